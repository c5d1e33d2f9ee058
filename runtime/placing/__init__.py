"""Between `dag/placement`, which knows numbers, and the swarm, which has records. Starts nothing; `answering_peers` alone asks anybody.

answering_peers   on whom jobs are placed: who is there
known_network     the swarm as placement sees it
link_guess        what a link is probably like, until somebody measures it
device_table      devices that a swarm file may name, `devices.toml`
swarm_file        `swarm.toml`: a swarm that need not exist
codec_choice      the codecs of a job's edges, from its links
codec_placement   placement and codecs together, as each depends on the other
stage_memory      what each stage needs on its peer
stage_count       over how many peers a model is served, and why; pure
placed_job        where the stages are to run, as a manifest says it
place_serving     where to run the stages of a model that is served
place_job         where to run the stages, for the peers that there are
place_experts     a model to serve, its experts in groups where layers are too large for one peer
placed_before     where a model was served the last time
plan              a placement for people
offline_graph     the graph of a job file, for a plan
offline_plan      a plan with nothing running
"""
