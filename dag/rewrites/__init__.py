"""Rewrites: pure functions from graph to graph, none for one model alone. What matches no pattern stays, or is refused.

clean                dead code, common subexpressions, canonical views and layers
experts              fuse products of rows with their experts
by_mode              merge the graphs of training and of evaluation
expert_groups        expert parallelism: groups of experts with cuts between them
positions            whether positions are independent of each other
caches/              caches of a session, so that a sequence may be run in pieces
last_position        logits of the last position only
end_to_end           whether several sequences may run concatenated
mixed_precision      half precision with float32 weights, for training
quantise             weight-only quantisation to int8 or int4
fuse                 operator fusion
"""
