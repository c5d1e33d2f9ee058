"""Continuous batching on CUDA: single positions (decode steps) are padded to a fixed batch size and replayed as a CUDA graph.

fixed_batch     batches of single positions, and their results by piece
row_attention   attention of the rows of a batch, each to the cache of its session
graph           a program of a fixed batch as a CUDA graph
cuda_decoding   the decoding stage
cuda_plane      the torch plane with this decoding stage
"""
