"""Content-addressed bytes. Knows nothing of what is in them.

index           what a blob is called: the hash of its list of chunks
eviction        what a store may delete, and what is worth telling the swarm of
disk            what it has, takes and refuses
partial_blob    one on its way into a store
store           blobs on disk, under a quota
fetch           the chunks of one blob, from several holders at once
download        one blob on its way here, from who has it to its last chunk
upload_budget   how much a peer gives away, shared fairly
unread          memory for what readers have not taken yet, and who gives way where there is none
serve           blobs for others, a share for each reader
announce        telling the swarm what a store holds
config          what may be set of all that
blobs           all of it as one: put, announce, fetch, serve

Words: a digest names a blob; a chunk is a MiB of it; a holder has the whole of it.
"""
