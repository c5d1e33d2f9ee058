"""How the device and the time of a peer are shared among jobs. Pure: knows neither torch nor the thread that computes
(`fusion.runtime.job.worker`).

share          which of the calls that wait for the device runs next
overrun        calls that take ten times their estimate
lost_device    errors after which the device may compute no more
real_pace      the speeds of the device in real steps
surplus        when free memory is returned to the system
accounts       the accounts that the cost of jobs is charged to
new_job_pace   a rate limit for jobs that are new to a peer
"""
