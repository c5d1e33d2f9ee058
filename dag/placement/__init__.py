"""Which device runs which stage. Every scheduler is judged by one model of a step. Knows numbers, not peers.

network        devices and links, as numbers
speeds         how fast a device runs operators, by what limits them
machine        the cores of a machine, which peers on it share
pipeline       a placement as work: what each stage computes, what flows between stages
pipeline_arrays   the same as arrays, by stage and by hop
codec_cost     bytes and seconds of a codec on an edge
schedule       the order of forward and backward passes: 1F1B, GPipe
step_model     how long a step takes, in closed form: the model
simulate       the same step, simulated event by event, to check the model
segments       the cost of every run of nodes as a stage
search_space   devices and cuts by number, and the estimate for a choice of them
recut          where to cut for devices in a given order
op_fence       clusters of fast links, cheap cuts between them
local_moves    small changes while the step gets shorter
baselines      equal shares, and the optimum of a chain, which OP-Fence must not lose to
shortlist      the devices of a very large swarm that the search considers
misfit         the message for a model that does not fit
replicas       which spare devices serve a stage beside its owner
place          the facade

Terms: fill, the time of the first microbatch alone; period, the time between microbatches, which the busiest stage, link,
line or codec sets; line, the uplink or downlink of a peer.
"""
