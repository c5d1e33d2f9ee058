"""Stages in JAX, for peers that were started with that plane. Nothing but its plane and `lacking` is known outside.

lacking           the operators that it does not run, by name; without JAX
library           JAX, loaded with a peer's threads
arrays            tensors of torch as arrays of JAX, and back
pointwise         the op-set in JAX: each element by itself,
moving            views, moves, and tensors made from sizes,
reducing          sums, scans, orders and losses,
contracting       products, norms, attention, experts,
windows           convolutions and pools
in_range          what is made with an index beyond its table
program           a graph as one function of JAX
dropped           dropout, with masks drawn as those of torch are
attached          which values have a gradient
residuals         what a backward pass needs, without what is held anyway
optimizer         AdamW and SGD, with torch's state
jax_training      a stage that is trained
jax_cache         what a session keeps of past positions
jax_decoding      a stage that decodes
jax_plane         the plane
"""
