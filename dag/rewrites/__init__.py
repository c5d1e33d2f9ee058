"""Graph -> Graph, pure. How features enter; never for one model's sake. What is not recognised stays, or is refused.

clean                drop what changes no value; write views one way
experts              one op for a product with the matrices that rows have chosen
by_mode              one graph of training and of evaluation
expert_groups        experts in groups that a cut may lie between (expert parallelism)
positions            whether each position is treated by itself
masks                what an attention mask lets a position see, by evaluating it
relative_bias        a bias by distance, from a table
own_positions        positions that a model counts itself, from its input
eager_attention      attention that a model writes out
repeated_heads       keys and values repeated for grouped queries
selected_keys        keys that an indexer selects for each query
visible_keys         what an attention sees and what is added to its scores, by its masks and biases
cached_convolution   short convolutions that read earlier positions from one
cached_recurrence    linear attention and state spaces that go on with an earlier state
kv_cache             attention that reads earlier positions from a cache
last_position        logits of the last position only
end_to_end           whether several sequences may run as one
mixed_precision      half precision with float32 weights, for training
quantise             matrices stored as int8 or int4
fuse                 one op for what exports spell out
"""
