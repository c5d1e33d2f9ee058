"""torch.export of a module: what torch runs while it exports, and which line of the model's code that is.

export            a module through torch.export
tensors           the tensors of a module by name, and a copy without their values
model_code        the line of the model's code that a message is about
random_draws      a model's random numbers, made of dropout masks
blocks            quotients of sizes: a source length padded to whole blocks, parts of the batch
size_masks        boolean masks that depend on sizes alone
masked_rows       rows that a mask selects, or its indices look up, in a number that depends on data
ctc               the loss of connectionist temporal classification, step by step
state             refuses state that a model keeps from run to run
one_sample        refuses models that treat one sample, or being exported, otherwise
size_texts        refuses strings that a model makes of free sizes
fourier           Fourier transforms as products
layers            layers composed of operators that the op-set has
torch_calls       the patches of torch's functions during an export
decompositions/   decompositions that torch lacks, or has in a form that the op-set cannot express
topk_masks        masks of the k highest along a free size
expert_loops      experts that a model runs in a loop, as products
dense_experts     experts that a model runs on every position, as products with those routed to
sorted_experts    experts whose rows a model sorts, as products
recurrences       linear attention and state spaces as one operator

It knows nothing of graphs.
"""
