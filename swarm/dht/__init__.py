"""The directory over a Kademlia DHT. Knows records only as signed bytes at a key and a subkey.

lookup          finding keys and nodes; pure but for `ask`
holders         which nodes keep which keys, and which few to ask; pure
values          how hivemind writes values, read with caps
guard           what others may store with us
directory       the directory over hivemind's DHT

Words: a node, a peer's part in the DHT; a holder, a node that keeps a key.
"""
