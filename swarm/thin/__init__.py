"""A way into the swarm without p2pd, hivemind and the DHT, for clients on any machine; and what peers offer such clients.

directory_server   the directory, as a peer tells a client of it
remote_directory   the directory, as a client has it then
addresses          which multiaddrs can be dialled; pure
transport          streams of frames, of a client that serves none
trio_thread        a thread in which trio runs
dialer             connections to peers, at most one to each; in trio
connection         TCP, Noise, Yamux: one connection; in trio
libp2p             py-libp2p, imported for less

Words: a thin client dials, asks and lends nothing; its gateway is the peer that it asks.
"""
