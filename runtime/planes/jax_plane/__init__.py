"""Stages in JAX, for peers that choose that plane. Only the plane and `lacking` are used outside.

lacking           the operators that it does not run; without JAX
library           loads JAX with a peer's threads
arrays            torch tensors as JAX arrays, and back
pointwise         the op-set in JAX: elementwise operators,
moving            views, moves, and tensors made from sizes,
reducing          sums, scans, orders and losses,
contracting       products, norms, attention, experts,
windows           convolutions and pools
in_range          checks indices against their tables
program           a graph as one JAX function
dropped           dropout with the masks of torch
attached          which values have a gradient
residuals         the residuals of a microbatch, without values that are held anyway
optimizer         AdamW and SGD, with torch's state
jax_training      the training stage
jax_cache         the KV cache of a session
jax_decoding      the decoding stage
jax_plane         the plane
"""
