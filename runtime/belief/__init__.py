"""What this process believes of jobs: their records, judged by who owns their stages (`fusion.swarm.authority`).

reading       the records of jobs, and which of them to believe
naming        which jobs a name means
shared_work   work that many callers request, done once for all of them
"""
