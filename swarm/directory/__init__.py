"""Who and what is in the swarm, as signed records that soon expire. Knows nothing of what a stage does, nor of a DHT.

records         the five kinds of record, and what each field may be
keys            where each is kept: a key, and a subkey for its author; pure
job_order       which of two words on a job knows better; pure
sealing         records as signed bytes, and the checks of whoever reads them
api             what a directory offers; heartbeat and lifetime
by_key          what directories that read by key have in common
bootstrap       where a peer finds the swarm
missing_peers   who is no longer listed, and when to look for them again; pure
membership      saying that we are there, every heartbeat, and finding a way in

Words: sealed, signed with its expiry; a shard, one of the keys over which peers and jobs are spread.
"""
