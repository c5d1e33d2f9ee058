"""Graph -> Graph, pure. How features enter; never for one model's sake. What is not recognised stays, or is refused.

clean                drop what changes no value; write views one way
experts              one op for a product with the matrices that rows have chosen
by_mode              one graph of training and of evaluation
expert_groups        experts in groups that a cut may lie between (expert parallelism)
positions            whether each position is treated by itself
caches/              keys, values and states that a session keeps, so that a sequence may be run in pieces
last_position        logits of the last position only
end_to_end           whether several sequences may run as one
mixed_precision      half precision with float32 weights, for training
quantise             matrices stored as int8 or int4
fuse                 one op for what exports spell out
"""
