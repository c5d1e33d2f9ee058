"""Which device runs which stage. All schedulers answer to one model of a step. Knows numbers, not peers.

network        devices and links, as numbers
speeds         how fast a device runs operators, by what limits them
shared         what peers on one machine share
pipeline       a placement as work: what each stage computes, what flows where
codec_cost     what a codec makes of an edge, as numbers
schedule       the order of forward and backward passes: 1F1B, GPipe
step_model     how long a step takes, in closed form: the model
simulate       the same step played out event by event, to hold the model against
segments       what every run of nodes would cost as a stage
search_space   what a search moves about in
recut          where to cut for devices in a given order
op_fence       clusters of fast links, cheap cuts between them
local_moves    small changes while the step gets shorter
baselines      what OP-Fence may not lose to
shortlist      the devices of a very large swarm that are worth a look
misfit         the message for a model that does not fit
replicas       which spare devices serve a stage beside its owner
place          the facade

Terms: fill, the first microbatch alone; period, what the busiest stage, link, line or codec needs for one.
"""
