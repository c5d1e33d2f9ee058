"""Which stages this peer holds. Knows services that run stages, not how they do.

hosting              the loop: looks for jobs, claims stages, runs them
claim_choice         which stages to claim now; pure
vacant_stages        stages without an owner, from look to look
standby_assignment   which stages to stand by for; pure
standby_pool         what it stands by for, brought here ahead of time
takeover             an owner that vanished, and who follows
handover             stages on their way to another peer
jobs/                what this peer says about jobs

Words: vacant, without an owner; a takeover follows an owner that is gone, a handover one that leaves.
"""
