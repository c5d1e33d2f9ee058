"""torch.export of a module, as its code is written: what torch runs while it exports, and which line it runs.

export            a module through torch.export
tensors           the tensors of a module by name, and a copy without their values
model_code        which line of the model's code a message is about
random_draws      random numbers of a model's own, made of masks of dropout
blocks            a source that is padded to whole blocks
size_masks        boolean masks that depend on sizes alone
masked_rows       the rows that a mask chooses
ctc               the loss of connectionist temporal classification, step by step
state             what a model would remember from run to run
one_sample        what a model would do otherwise with one sample, or while it is exported
size_texts        texts that a model makes of sizes that are free
fourier           Fourier transforms as products
layers            layers made of operators that the op-set has
torch_calls       what torch's own functions do otherwise meanwhile
decompositions/   operators that torch takes apart otherwise than the op-set can say
topk_masks        masks of the highest few along a size that is free
expert_loops      experts that a model runs in a loop, as products
dense_experts     every position to every expert, as products with those that are chosen
sorted_experts    experts whose rows a model sorts, as products
recurrences       linear attention and state spaces as one operator

It knows nothing of graphs.
"""
