"""A job into the swarm, and out of it. Runs on the launching machine.

prepare            from a job file to blobs and a manifest
serving_spec       what is asked for where a model is to be served
draft              the draft model that goes along
servable           a model's directory as a graph that is served
prepare_serving    from that to blobs and a manifest
on_disk            who has which blobs on the disk
serving_plan       what serving it would take; nothing starts
pack               a job's data as blobs
training_job       what a job file trains, and on what
weights            the weights of a stage as a blob
prepared           what is ready to be handed over
shard              from a placed graph to blobs and manifest
handed_over        how far the swarm has taken a job over
first_token        a served model is ready once a token has gone around
launch             offered to the swarm, until the swarm holds all of it
export_files       what goes along so that an export can be served
snapshot_turns     which snapshot of a job that still trains is served, and when; pure
export             a trained job as a directory with the model's own names
served_snapshots   a job's newest snapshot, served while it goes on
"""
