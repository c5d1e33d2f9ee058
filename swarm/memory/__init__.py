"""A swarm within one process, for unit tests and simulated worlds.

clock       a clock that a test advances
network     links between the peers, which a test can cut
transport   streams with the frames, caps and handlers of real ones
directory   records signed, checked and stored as by the nodes of the DHT
"""
