"""What the rooms of the runtime share. Knows no torch but in `worker`, and no room.

errors           what can go wrong in a job; users see the line
fields           frozen dataclasses from untrusted mappings
manifest         a job as data; its digest is the job's id
manifest_wire    its bytes, and all checks of one that a peer reads
manifest_shelf   the manifests of the swarm's jobs, fetched in the background
admission        which peers a trainer admits
spec             `job.toml`, parsed strictly
toml_files       TOML files of users: mistakes in one line
size_text        sizes as people write them and read them
model_files      checks of a model's directory, before anything is loaded
text             prompts to token ids and back, also of a text that is still generated
progress         the progress of a job, and the state of its stages
protocol         every protocol, by name and cap
cool_down        exponential back-off after failures
memory_budget    the memory that a peer lends, and its reservations
worker           the thread of a device, and whose call runs on it
watch            an observer of stages, for simulations
context          what the parts of one peer process share
stage_graphs     the stages of a job's graph, read and cut once
"""
