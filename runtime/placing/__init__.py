"""Between `dag/placement`, which knows numbers, and the swarm, which has records. Starts nothing; only `answering_peers` sends
requests.

answering_peers   the peers that jobs are placed on
known_network     the swarm as placement sees it
link_guess        the likely latency and rate of a link that was not measured
device_table      devices that a swarm file may name, `devices.toml`
swarm_file        `swarm.toml`: a swarm that need not exist
codec_choice      the codecs of a job's edges, from its links
codec_placement   placement and codecs together, as each depends on the other
stage_memory      what each stage needs on its peer
stage_count       over how many peers a model is served, and why; pure
placed_job        a placement in the manifest's terms
place_serving     the placement of a model that is served
place_job         the placement of a job on the peers of the swarm
place_experts     a model to serve, its experts in groups where layers are too large for one peer
placed_before     the last placement of a model
plan              a placement as users read it
offline_graph     the graph of a job file, for a plan
offline_plan      a plan with nothing running
"""
