"""The caches of a session, so that a sequence may be run in pieces: keys and values of attention, and the states of convolutions
and recurrences.

masks                what an attention mask makes visible, by evaluating it
relative_bias        a relative position bias, looked up in a table
own_positions        positions that a model computes itself, replaced by its input
node_patterns        patterns of a node or two
eager_attention      the pattern of attention that a model spells out
repeated_heads       keys and values repeated for grouped-query attention
selected_keys        keys that an indexer selects for each query
visible_keys         the masks and biases of an attention, classified
cached_convolution   short convolutions that read earlier positions from a cache
cached_recurrence    linear attention and state space models that continue from an earlier state
kv_cache             attention that reads earlier positions from a cache
"""
