"""Measures the links between peers, by real traffic where there is any. Knows nothing of jobs.

probes          pings, trains of bytes and reports between two peers, and their allowances
packet_trains   the length of a train, and the rate that several show; pure
prober          sends trains over links without newer measurements, one at a time
table           the state of each neighbour's link
monitor         all of it together: measures and publishes this peer's links
view            the link between any two peers, from the records of all; pure
routes          the cheapest path over the holders of each stage; pure

Words: a link is between two peers; a line is a peer's access to all others; a train, bytes sent at once to be timed; a neighbour, a peer
whose link we measure.
"""
