"""Who and what is in the swarm, as signed records that soon expire. Knows nothing of what a stage does.

records         the five kinds of record, and what each field may be
keys            where each is kept: a key, and a subkey for its author; pure
job_order       which of two words on a job knows better; pure
sealing         records as signed bytes, and the checks of whoever reads them
api             what a directory offers; heartbeat and lifetime
lookup          finding keys and nodes in a Kademlia DHT; pure but for `ask`
holders         which nodes keep which keys, and which few to ask; pure
dht_values      how hivemind writes values, read with caps
dht_guard       what others may store with us
dht             the directory over hivemind's DHT
bootstrap       where a peer finds the swarm
missing_peers   who is no longer listed, and when to look for them again; pure
membership      saying that we are there, every heartbeat, and finding a way in

Words: sealed, signed with its expiry; a shard, one of the keys over which peers and jobs are spread; a holder, a node that keeps a key.
"""
