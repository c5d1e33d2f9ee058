"""Which stages this peer holds. Knows services that run stages, not how they do.

hosting              the loop: looks for jobs, decides, publishes
job_view             what it sees of jobs, and of who has their stages
hosted_stages        the stages that run here, from our claim to its release
stage_claims         how a stage comes here: claimed, or taken over
vacant_stages        stages without an owner, from look to look
claim_choice         which stages to claim now; pure
standby_assignment   which stages to stand by for; pure
standby_pool         what it stands by for, brought here ahead of time
takeover             an owner that vanished, and who follows
handover             stages on their way to another peer
jobs/                what this peer says about jobs

Words: vacant, without an owner; a takeover follows an owner that is gone, a handover one that leaves.
"""
