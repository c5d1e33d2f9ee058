"""One process of the swarm put together. The top of the runtime: nothing in it knows this room.

network           a process's place in the swarm: streams, directory, blobs, claims
assembly          what works on a peer, put together: for the product and for every harness
announcement      what a peer says about itself
questions         what it tells whoever asks
config            what a volunteer says of the peer to run
machine           what a peer lends of its machine
resident_memory   what its process holds of the memory, kept to what is set aside
garbage           when it looks for memory that cycles hold, kept to a share of the time
plane_choice      the planes that there are, by name
peer              a volunteer's peer, opened and closed in order
client            the swarm without lending anything
client_context    what both work with
thin_client       the same through a peer, without hivemind and PyTorch
keys              the keys of a home's user, and what they let a process do
free_memory       how much memory this process may still have
capability        what this machine can do, measured at start and again while idle
probes            small graphs that show how fast operators run; pure
peer_file         where the peer runs, for commands on this machine
"""
