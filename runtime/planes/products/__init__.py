"""Products of rows with matrices, and decode attention, for decoding stages. Batch-invariant: a row has the same bits in any batch. And
products in half precision for training stages (`in_float32`), which are not.

machine_code         functions that LLVM compiles for this machine
attention_code       decode attention, as machine code
single_queries       decode attention of a batch in one call
row_code             RMS norm, rotary positions and SiLU gates, as machine code
fused_rows           fuses nodes of a graph into these
packed_code          products with float32 matrices, as machine code
packed               packs such matrices; the library's products where there is no machine code
half                 products in half precision, one a piece where the library's are not batch-invariant
half_code            products with matrices in half precision, as machine code
half_products        linear layers, experts and batches by that code, where it has the library's bits
in_float32           products in half precision, in training, on a CPU without instructions for it
quantised_code       products with matrices of int8 and int4, as machine code
quantised            the same on any device, and packed
experts              products of rows with the matrices of experts (grouped GEMM)
quantised_experts    the same with matrices of int8 and int4
quantised_matrices   the quantised matrices of a stage, and the functions for the nodes that read them
"""
