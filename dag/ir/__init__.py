"""A model as data. A graph that passes the checks here is safe to plan with, whoever sent it.

graph               inputs, variables, nodes, outputs; Ref names a value
dims                dimensions: numbers, or polynomials over symbols
errors              what can be wrong with a graph
opset               every operator that a graph may use, by name
opset_spec          what a row of the op-set states
opset_shapes        the arithmetic that shape rules share
opset_pointwise     each element by itself
opset_reduce        along dimensions: sums, softmax, sorting, losses
opset_contract      products, look-ups, norms, attention
opset_quantised     products and look-ups of matrices stored as int8 and int4
opset_experts       products with the matrix that each row has chosen
opset_attention     attention to a cache with capped or biased scores
opset_recurrence    states that decay, and that every position writes to and reads
opset_convolution   windows that slide
opset_index         values copied to other places
opset_views         the same values in another shape
opset_make          tensors made from numbers
validation          the rules of a graph
serialise           a graph as canonical bytes, and back from a stranger's

Terms: a variable is a parameter or a buffer; mixing, what an op does to a dimension whose positions it does not keep apart.
"""
