"""Who should speak for a stage. That two never do at once is for the receivers of frames, which refuse a lower term.

election          of the claims that count: who owns a stage, who follows, who should claim: pure rules
tenure            whose claim counts, in one reader's view: the pure rule that strangers cannot get around
votes             signed votes on who does not hold a stage any more, which claims carry as their proof
voting            our votes on who holds a stage, and those of others on us
leases            holding stages: claims published, won, renewed, lost, released
heartbeat         every claim of ours renewed once in a while, each by itself
standbys          standing by for stages that others own, or serving beside them
claim_publisher   our own claims, and how the swarm is told
claim_cache       what we remember of others' claims, and who holds each stage by them
owners_seen       who owned which stage, for those who judge what is said of a job

Words: a claim says "this stage is mine" under a term; a lease, for how long; owner, replica (serves beside it), standby, released;
a tenure is what a reader believes of who holds a stage; a stage's voters are the owners of the stages nearest to it; a vote says that its
holder is gone and who is to follow.
"""
