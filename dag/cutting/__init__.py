"""From a graph and cuts to stages. Knows nothing of who runs them.

stage        a stage and its edges: the frozen values
cuts         splitting a graph at any indices
references   what arguments refer to: replacing, finding
mode         what is computed in training, and what in evaluation
source       the two graphs of an encoder-decoder, and what each has of a stage
positional   which nodes are repeated in every stage instead of being sent
crossing     what any cut would send, as a table
strides      where the elements of views lie: which reshapes have to copy
costs        FLOPs and bytes of nodes and stages, by formula
memory       what a stage needs in memory: the one formula

Terms: a cut is the index of the node at which a stage starts; a tie-group, the stages that hold one variable.
"""
