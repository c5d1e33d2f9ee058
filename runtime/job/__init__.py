"""What the rooms of the runtime share. Knows no torch but in `worker`, and no room.

errors           what can go wrong in a job; users see the line
fields           frozen dataclasses from mappings that somebody else wrote
manifest         a job as data; its digest is the job's id
manifest_wire    its bytes, and what a peer checks before it believes one
manifest_shelf   the manifests of the swarm's jobs, fetched in the background
admission        whom a trainer lets take part
spec             `job.toml`, parsed strictly
toml_files       TOML that somebody wrote: mistakes in one line
size_text        sizes as people write them, and as they are told what is missing
model_files      what must lie in a model's directory, looked at before anything is loaded
text             prompts to token ids and back, also while a text is still being made
progress         how a job stands: what watchers are shown
protocol         every protocol, by name and cap
cool_down        what failed is left alone for a while
memory_budget    the memory that a peer lends, and what it is set aside for
worker           the thread of a device, and who has it
watch            who looks on, in a simulation
context          what the parts of one peer process share
stage_graphs     the stages of a job's graph, read and cut once
"""
