"""For CUDA: Triton kernels where torch has no batch-invariant ones, and bounds checks for torch's.

available           the kernels, where they run
attention_kernels   decode attention
expert_kernels      products of rows with the matrices of experts (grouped GEMM)
in_range            clamps indices to their tables
quantised_kernels   products with matrices of int8 or int4
"""
