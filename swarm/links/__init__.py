"""What the links between peers are like, from real traffic where there is any. Knows nothing of jobs.

probes          pings, trains of bytes and reports between two peers, and their allowances
packet_trains   how long a train has to be, and what several say together; pure
prober          sends trains where nothing newer is known, one at a time
table           what is remembered of each neighbour
monitor         all of it as one: what this peer knows and publishes of its links
view            what the records of all peers say of the link between any two; pure
routes          the cheapest path over the holders of each stage; pure

Words: a link is between two peers, a line what a peer has to all others; a train, bytes sent at once to be timed; a neighbour, a peer
that we measure.
"""
