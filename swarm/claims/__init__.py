"""Which peer should act for a stage. That two never do at once is ensured by the receivers of frames, which refuse a lower term.

election          of the claims that count: who owns a stage, who follows, who should claim: pure rules
tenure            whose claim counts, in one reader's view: the pure rule, safe against strangers
votes             signed votes against a stage's holder, which claims carry as their proof
voting            our votes against other holders, and others' votes against us
leases            holding stages: claims published, won, renewed, lost, released
heartbeat         renews each of our claims in a task of its own
standbys          standing by for stages that others own, or serving beside them
claim_publisher   our own claims, and their publication
claim_cache       the claims that we know, and who holds each stage by them
owners_seen       who owned which stage: the evidence by which job records are judged

Words: a claim asks for a stage under a term, and its lease for how long; roles: owner, replica (serves beside it), standby, released;
a tenure is one reader's view of who holds a stage; a stage's voters are the owners of its voting stages, those nearest to it; a vote
states that the holder is gone and who is to follow.
"""
