"""From a graph and cuts to stages. Knows no peers.

stage        a stage and its edges: the frozen values
cuts         splitting a graph at any indices
references   traversal of arguments and dependencies
mode         the nodes of training, and of evaluation
source       the encoder half and the decoder half of a stage
positional   which nodes are recomputed in every stage instead of being sent
crossing     the values that may cross a cut, as a table
strides      the memory layout of views: which reshapes have to copy
costs        FLOPs and bytes of nodes and stages, by formula
memory       the memory of a stage: the one formula

Terms: a cut is the index of the node at which a stage starts; a tie-group, the stages that hold one variable.
"""
