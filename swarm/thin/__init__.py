"""Thin clients: access to the swarm without p2pd, hivemind and the DHT, from any machine; and what peers serve them.

directory_server   the directory, as a peer serves it to clients
remote_directory   the directory, as a client reads it from peers
addresses          which multiaddrs can be dialled; pure
transport          opens streams of frames; serves none
trio_thread        a thread in which trio runs
dialer             connections to peers, at most one to each; in trio
connection         TCP, Noise, Yamux: one connection; in trio
libp2p             imports py-libp2p without its unused parts

Words: a thin client dials, sends requests and lends nothing; its gateway is the peer that it sends them to.
"""
