"""The directory over a Kademlia DHT that strangers may join. Knows records only as signed bytes at a key and a subkey.

lookup           finding keys and nodes; pure but for `ask`
holders          which nodes keep which keys, and which few to ask; pure
values           how hivemind writes values, read with caps; where keys and nodes lie
remembered       what was read under keys that all share, a share for each who reports it; pure
routing_table    the nodes we know; pure
guard            what others may store with us; pure
record_store     what we keep for others, shared out among them
request_budget   how much of us each of them may use
clock            what time it is for the swarm; pure
wire             hivemind's three calls, as values with caps
call_server      others' calls, taken from p2pd on a socket of ours, and how many of them
service          what we answer
store_batches    what goes to the same node at the same moment
calls            what we ask, and who does not answer
directory        the directory

Words: a node, a peer's part in the DHT; a holder, a node that keeps a key; an account, a peer or the network it is in.
"""
