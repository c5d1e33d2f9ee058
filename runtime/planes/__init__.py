"""What runs stages. A plane knows no peers, no protocol and no codecs.

plane             what a plane promises: forward, backward, apply, state; decoding
input_sizes       the sizes of symbols, from the shapes of inputs
codegen           a graph as one Python function, with nothing of its text in it
preemption        where a long run of a graph may be preempted
torch_ops         how that function calls each operator
batch_invariant   functions that round by how many numbers they get, made not to
dropout           masks that are a function of (seed, step, microbatch, node)
recurrence        a state that every position writes to and reads
attention         of queries to keys and values that are given
kv_cache          what a session keeps of past positions
learning_rate     the learning rate of each step, without torch
optimizer         AdamW and SGD as data, with their schedules
weights_file      tensors in a file, written and read one at a time
stage_values      the values that a stage takes and gives, by name
kernels/          kernels of our own for CUDA, and what torch's are kept from
products/         products of rows with matrices, and attention of rows, the same bits in any company
matrices          the variables of a stage that decodes, laid out for such products
sessions          what a stage that decodes keeps of its sessions, and the table of them
sequences         pieces of several sequences in one run, and the operators that read what they keep
torch_decoding    a stage that decodes, on CPU or CUDA
torch_plane       all of it on CPU or CUDA
cuda/             continuous batching on CUDA: padded batches, CUDA graphs
jax_plane/        all of it in JAX
"""
