"""Kernels of our own for CUDA, in Triton, where torch has none that give a row the same bits in any company.

available           whether there are any here
attention_kernels   single positions to the caches of their sessions
expert_kernels      products of rows with the matrix that each has chosen
quantised_kernels   products with matrices of int8 or int4
"""
