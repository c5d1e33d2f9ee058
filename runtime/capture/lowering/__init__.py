"""An exported program in the op-set.

aten_names        the op-set's names for torch's operators and arguments
sizes             sizes, shapes and dtypes
complex_numbers   complex numbers as pairs of real values
triangles         causal masks and position counts that a module keeps as buffers
kept_values       values that a model writes to its buffers for the next run
slices            slices of sizes that are free
decompose         decomposes operators that the op-set does not have
lower             the exported program as a graph
module_graph      a module through all of this
captured_before   graphs that were captured before, in a home
"""
