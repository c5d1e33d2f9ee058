"""Who may do what in a job. Signatures authenticate a peer; this room authorises it. It opens no streams; all but
`wallet`, which reads the invites of a home, is pure.

law             what a job's manifest declares about that
signed          the form of what a peer signs for others to carry
grants          permission to take part, in chains of at most two links that only narrow
revocation      grants taken back
invites         a chain of grants as a line of text
wallet          the grants that this process can show
access          all of it together: who may do what in the jobs that this process knows
statements      what a peer states about a job, signed so that others can carry it
belief          which of many records of a job to believe
names           which job a name means
"""
