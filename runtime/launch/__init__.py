"""A job into the swarm, and out of it. Runs on the launching machine.

prepare            from a job file to blobs and a manifest
prepare_serving    from a model's directory
draft              the draft model that goes along
pack               a job's text as blobs
shard              from a placed graph to blobs and manifest
launch             offered to the swarm, until the swarm holds all of it
export_files       what goes along so that an export can be served
snapshot_turns     which snapshot of a job that still trains is served, and when; pure
export             a trained job as a directory with the model's own names
served_snapshots   a job's newest snapshot, served while it goes on
"""
