"""Who should speak for a stage. That two never do at once is for the receivers of frames, which refuse a lower term.

election          who owns a stage, who follows, who should claim: pure rules over claims
leases            holding stages: claims published, won, renewed, lost, released
standbys          standing by for stages that others own, or serving beside them
claim_publisher   our own claims, and how the swarm is told
claim_cache       what we remember of others' claims

Words: a claim says "this stage is mine" under a term; a lease, for how long; owner, replica (serves beside it), standby, released.
"""
