"""For CUDA: kernels of our own, in Triton, where torch has none that give a row the same bits in any company; and what torch's are
kept from.

available           whether there are any here
attention_kernels   single positions to the caches of their sessions
expert_kernels      products of rows with the matrix that each has chosen
in_range            indices that stay within their tables
quantised_kernels   products with matrices of int8 or int4
"""
