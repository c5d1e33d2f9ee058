"""Which stages this peer holds. Knows services that run stages, not how they do.

hosting              the loop: reads the directory, decides, publishes
job_view             the jobs and their stages' owners, as this peer sees them
job_faults           jobs that raised an unexpected error here, and are left to other peers
hosted_stages        the stages that run here, from our claim to its release
stage_claims         how this peer gets a stage: claimed, or taken over
runnable_stages      which stages its plane can run
vacant_stages        stages without an owner, and since when
claim_choice         which stages to claim now; pure
standby_assignment   which stages to stand by for; pure
standby_needs        which stages are short of standbys
standby_pool         the stages that it stands by for, prepared ahead of time
hold_frames          the frames about who holds a stage
single_flight        work that several callers request at the same time
owner_probe          a probe of whether an owner is there
idle_owners          owners that answer but do no work
vote_requests        votes that a holder is gone
transfer             the transfer of one stage to another peer
takeover             failover: who takes over from an owner that vanished
handover             which stages go to another peer, and when
jobs/                the job records and progress that this peer publishes and serves

Words: vacant, without an owner; a takeover follows an owner that is gone, a handover one that leaves.
"""
