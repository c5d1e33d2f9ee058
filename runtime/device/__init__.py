"""What jobs get of one device, and of the rest of a peer. Pure: knows neither torch nor the thread that computes
(`fusion.runtime.job.worker`).

share          which of the calls that wait for it runs next
overrun        calls that take ten times what they should
lost_device    errors after which it may compute no more
real_pace      how much longer steps compute than probes say
surplus        when memory that nobody uses any more goes back to the system
accounts       whom what a job costs is charged to
new_job_pace   how fast a peer takes up jobs that are new to it
"""
