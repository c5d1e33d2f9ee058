"""A model as data. A graph that passes the checks here is safe to plan with, whoever sent it.

graph               inputs, variables, nodes, outputs; Ref names a value
dims                dimensions: numbers, or polynomials over symbols
errors              errors of graphs
opset               every operator that a graph may use, by name
opset_spec          the specification of an operator
opset_shapes        arithmetic of shapes and dtypes
opset_pointwise     element-wise ops
opset_reduce        along dimensions: sums, softmax, sorting, losses
opset_contract      products, look-ups, norms, attention
opset_quantised     products and look-ups of matrices stored as int8 and int4
opset_experts       products of rows with their experts
opset_attention     variants of cached attention; cross-attention
opset_recurrence    linear attention and state-space models
opset_convolution   convolutions and pooling
opset_index         values copied to other places
opset_views         views
opset_make          tensors from numbers
validation          validation of a graph
serialise           a graph as canonical bytes, and decoding of untrusted ones

Terms: a variable is a parameter or a buffer; an op mixes a dimension if it combines or moves
values of different positions of it.
"""
