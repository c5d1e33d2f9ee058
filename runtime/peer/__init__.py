"""One process of the swarm put together. The top of the runtime: nothing in it knows this room.

network           a process's place in the swarm: streams, directory, blobs, claims
assembly          the services and the hosting of a peer, for the product and for every harness
announcement      a peer's record in the directory, and its peer file
status_server     the status and directory requests that it serves
config            a volunteer's options for a peer
machine           what a peer lends of its machine
resident_memory   the process's memory, trimmed to its reservations
garbage           garbage collection, limited to a share of the time
plane_choice      the planes, by name
peer              a volunteer's peer, opened and closed in order
client            the swarm without lending anything
client_context    the context of a command
thin_client       the same through a peer, without hivemind and PyTorch
keys              the keys of a home's user, and what they let a process do
free_memory       how much memory this process may still take
capability        the speeds of this machine, measured at start and again while idle
probes            small graphs that show how fast operators run; pure
peer_file         where the peer runs, for commands on this machine
"""
