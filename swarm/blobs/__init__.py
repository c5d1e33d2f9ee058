"""Content-addressed blobs. Knows nothing of their content.

index           a blob's digest: the hash of its list of chunk hashes
eviction        which blobs a store may delete, and which it announces; pure
disk            free space and errors of the disk
partial_blob    a blob being fetched into a store
store           blobs on disk, under a quota
fetch           the chunks of one blob, from several holders at once
download        the fetch of one blob, from finding its holders to its last chunk
upload_budget   a rate limit of uploads, shared fairly
unread          a memory limit for chunks that readers have not taken yet
serve           serves blobs to others, a share for each reader
announce        announces a store's blobs in the directory
config          the configuration
blobs           the interface: put, announce, fetch, serve

Words: a digest names a blob; a chunk is a MiB of it; a holder has the whole of it.
"""
