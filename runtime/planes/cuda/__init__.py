"""Continuous batching on CUDA: positions that run singly (decode steps) are padded to one batch size and replayed as a CUDA graph.

fixed_batch     which positions go together, and what each piece gets of it
row_attention   attention of such positions, each to the cache of its own session
graph           a program of this shape as a CUDA graph
cuda_decoding   a stage that decodes so
cuda_plane      the torch plane with such stages
"""
