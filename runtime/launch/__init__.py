"""A job into the swarm, and out of it. Runs on the launching machine.

prepare            from a job file to blobs and a manifest
serving_spec       the options of `serve`, as values
draft              the draft model for speculative decoding
servable           a model's directory as a graph that is served
prepare_serving    from that to blobs and a manifest
on_disk            which peers have which blobs on disk
serving_plan       what serving it would take; nothing starts
pack               a job's data as blobs
training_job       what a job file trains, and on what
weights            the weights of a stage as a blob
prepared           a job that is ready to be launched
shard              from a placed graph to blobs and manifest
handed_over        how far the swarm has taken a job over
first_token        the check that a served model works
launch             published, until the swarm holds all of it
export_files       files of a job that make its export servable
snapshot_turns     which snapshot of a job that still trains is served, and when; pure
export             a trained job as a directory with the model's own names
served_snapshots   a job's newest snapshot, served while it goes on
"""
