"""Execution planes, which run stages. A plane knows no peers, no protocol and no codecs.

plane             the interface of a plane: forward, backward, apply, state; decoding
input_sizes       the sizes of symbols, from the shapes of inputs
codegen           compiles a graph to one Python function, without any of its text
preemption        where a long run of a graph may be preempted
torch_ops         how that function calls each operator
batch_invariant   batch-invariant forms of operators that round by the number of elements
dropout           masks that are a function of (seed, step, microbatch, node)
recurrence        a state that is updated and read at every position
attention         attention of queries to given keys and values
kv_cache          the KV cache of a session
learning_rate     the learning rate of each step, without torch
optimizer         AdamW and SGD, and gradient norms
weights_file      tensors in a file, written and read one at a time
stage_values      the inputs, outputs and state of a stage, by name
kernels/          Triton kernels for CUDA, and bounds checks for torch's
products/         batch-invariant products of rows with matrices, and decode attention
matrices          the variables of a decoding stage, prepacked for these products
sessions          the sessions of a decoding stage and their retained caches
sequences         the state of a batched run, and the operators that read caches
torch_decoding    a decoding stage on CPU or CUDA
torch_plane       the plane on CPU or CUDA
cuda/             continuous batching on CUDA: padded batches, CUDA graphs
jax_plane/        the plane in JAX
"""
