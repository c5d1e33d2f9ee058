"""What a peer says about jobs, to the directory and to whoever asks. Runs none.

service          what runs the stages of one kind of job, as hosting sees it
board            the jobs that a peer knows of: the one memory of them; pure
record_proofs    what goes with a record so that others believe it
gossip           the records that it publishes of them
server           its answers to whoever asks
watchers         who follows jobs here, so many and no more
files            the last record of each, on disk
recalled_blobs   what is kept of the jobs that the disk tells of
"""
