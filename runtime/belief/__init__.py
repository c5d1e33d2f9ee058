"""What this process believes of jobs: all that is said of them, judged by who owns their stages (`fusion.swarm.authority`).

reading       what is said of jobs, and what of it to believe
naming        which jobs are meant by a name
shared_work   work that many ask for, done once for all of them
"""
