"""An exported program in the op-set.

aten_names        torch's names for operators and constants, in ours
sizes             sizes, shapes and dtypes
complex_numbers   complex numbers in real arithmetic
triangles         causal masks and counts that a module keeps as buffers
kept              what a model writes to its buffers for the next run
decompose         operators that the op-set does not have, as others that it has
lower             a program as a graph
"""
