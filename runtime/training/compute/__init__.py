"""One stage's part of a step. Knows stages and tensors, no peers and no streams.

rad            remote automatic differentiation
device_calls   its calls on the device: timed, held to what its graph promises
finite_check   which tensors of a step were not finite
loss_scale     scaled gradients, for training in float16
inbox          tensors that a stage waits for, checked against its plan
stage_codecs   which codec each goes with, and what is remembered of it
"""
