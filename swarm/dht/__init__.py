"""The directory over a Kademlia DHT that strangers may join. Knows records only as signed bytes at a key and a subkey.

lookup           the search for keys and nodes; pure but for `query`
holders          which nodes keep which keys, and which few to query; pure
values           hivemind's encoding of values, read with caps; the ids of keys and nodes
remembered       a cache of the records of shared keys, in shares of those who report them; pure
routing_table    the nodes we know; pure
guard            what others may store with us; pure
record_store     the records that we keep for others, in fair shares
request_budget   how much of our time each of them may use
clock            our clock's correction by those of others; pure
wire             hivemind's three calls, as values with caps
call_server      others' calls, received from p2pd on a socket of ours, with limits
service          the answers to others' calls
store_batches    records for the same node, sent in one request
calls            our calls, and which nodes do not answer
directory        the directory

Words: a node, a peer's part in the DHT; a holder, a node that keeps a key; an account, a peer or the network it is in.
"""
