"""Training data: samples are a function of (seed, step, microbatch), the same on every peer.

samples      which samples a microbatch holds; without torch
batches      text packed into token ids, and the samples of a microbatch
data_blobs   fetches the blobs of a job's data
ledger       a hash chain over the samples that committed steps used
"""
