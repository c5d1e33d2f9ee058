"""Snapshots: the state of a job at a step. The lead decides when one is taken.

snapshot          shards and the index that names them
snapshot_period   how often one pays: Young's rule; pure
late_parts        which owner is replaced where one does not become durable; pure
stage_snapshots   one stage's part: taken, saved, replicated, restored
stage_files       the blobs of one stage
loaded_stage      a stage in memory, as a loader returns it
shards_here       which shards of the newest snapshots are on this peer

Terms: a shard is one stage's part; a snapshot is durable once every shard is on two peers.
"""
