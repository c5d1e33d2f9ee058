"""Products of rows with a matrix, and attention of single positions, for stages that decode: batch-invariant: a row has the same
bits in any batch.

machine_code        functions that LLVM makes for this machine
attention_code      attention of single positions, as machine code
single_queries      all that run at once in one call
row_code            norms, rotary positions and gates, as machine code
fused_rows          which nodes of a graph these compute
packed_code         products with matrices of float32, as machine code
packed              how such matrices lie, and what a library does where there is no such code
half                products in half precision, by piece where a row's bits depend on whether it comes alone
quantised_code      products with matrices stored as int8 and int4, as machine code
quantised           the same on any device, and how such matrices lie
experts             products of rows with the matrix that each has chosen, rows sorted by it
quantised_experts   the same with matrices stored as int8 and int4
stored              the quantised matrices of a stage, and what computes the nodes that read them
"""
