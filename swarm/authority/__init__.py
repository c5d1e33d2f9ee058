"""Who may do what in a job. Signatures say who speaks; this room says who may. It opens no streams; all but
`wallet`, which reads the invites of a home, is pure.

law             what a job's manifest says of that, as the swarm sees it
signed          the form of what a peer signs for others to carry
grants          leave to take part, given in chains of at most two links that only narrow
revocation      grants taken back
invites         a chain of grants as a line of text
wallet          the grants that this process can show
access          all of it as one: who may, in the jobs that this process knows
statements      what a peer says of how a job stands, signed so that others can repeat it
belief          which of many words on a job to believe
names           which job somebody means by a name
"""
