"""One stage's part of a step. Knows stages and tensors, no peers and no streams.

rad            remote automatic differentiation
loss_scale     scaled gradients, for training in float16
inbox          tensors that a stage waits for, checked against its plan
stage_codecs   which codec each goes with, and what is remembered of it
"""
