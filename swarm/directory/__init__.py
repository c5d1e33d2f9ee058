"""The directory: peers, jobs, claims and blob providers as signed records that soon expire. Knows nothing of what a stage does,
nor of a DHT.

records         the five kinds of record, and what each field may be
keys            where each is kept: a key, and a subkey per author; pure
job_order       which of two records of a job is newer; pure
sealing         records as signed bytes, and the checks of their readers
api             what a directory offers; heartbeat and lifetime
by_key          the part that directories which read by key share
bootstrap       the addresses at which a peer joins the swarm
missing_peers   peers that are no longer listed, and when to dial them again; pure
membership      announcing us every heartbeat, and joining the swarm

Words: sealed, signed with its expiry; a shard, one of the keys over which peers and jobs are spread.
"""
