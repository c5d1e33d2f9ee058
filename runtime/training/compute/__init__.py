"""One stage's part of a step. Knows stages and tensors, no peers and no streams.

rad            remote automatic differentiation
device_calls   its calls on the device: timed, and bounded by the graph's estimate
finite_check   which tensors of a step had numbers that are not finite
loss_scale     scaled gradients, for training in float16
inbox          received tensors, checked against the plan
stage_codecs   encodes and decodes tensors, with masks and error feedback
"""
