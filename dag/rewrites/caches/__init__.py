"""What a session keeps, so that a sequence may be run in pieces: keys and values of attention that is recognised, and the states of
convolutions and recurrences.

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
"""
