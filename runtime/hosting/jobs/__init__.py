"""The job records and progress that a peer publishes and serves. Runs no job.

service          what runs the stages of one kind of job, as hosting sees it
board            the jobs that a peer knows of: the one memory of them; pure
record_proofs    the proof that a published record carries
gossip           the records that it publishes
server           requests about a job
watchers         a limit on the streams that follow jobs
files            the last record of each job, on disk
recalled_blobs   the blobs that the jobs on disk need
"""
