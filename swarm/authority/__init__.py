"""Who may do what in a job. Signatures say who speaks; this room says who may. Pure: it opens no streams and reads no clock.

law             what a job's manifest says of that, as the swarm sees it
grants          leave to take part, given in chains of at most two links that only narrow
statements      what a peer says of how a job stands, signed so that others can repeat it
belief          which of many words on a job to believe
names           which job somebody means by a name
"""
