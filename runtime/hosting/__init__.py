"""Which stages this peer holds. Knows services that run stages, not how they do.

hosting              the loop: looks for jobs, decides, publishes
job_view             what it sees of jobs, and of who has their stages
job_faults           jobs that failed here as nobody expected, and are left to others
hosted_stages        the stages that run here, from our claim to its release
stage_claims         how a stage comes here: claimed, or taken over
runnable_stages      which stages its plane can run
vacant_stages        stages without an owner, from look to look
claim_choice         which stages to claim now; pure
standby_assignment   which stages to stand by for; pure
standby_needs        what each stage lacks of standbys, from look to look
standby_pool         what it stands by for, brought here ahead of time
hold_frames          what peers say to each other about who holds a stage
single_flight        work that several want at the same time
owner_probe          looking whether an owner is there
idle_owners          owners that are there and do nothing
vote_requests        the votes of those whose vote counts on that
transfer             one stage passed to another peer
takeover             an owner that vanished, and who follows
handover             which stages go to another peer, and when
jobs/                what this peer says about jobs

Words: vacant, without an owner; a takeover follows an owner that is gone, a handover one that leaves.
"""
