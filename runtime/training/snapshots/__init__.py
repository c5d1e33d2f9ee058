"""The state of a job at a step. When one is taken, the lead decides.

snapshot          shards and the index that names them
snapshot_period   how often it pays: Young's rule; pure
stage_snapshots   one stage's part: taken, saved, held for a neighbour, gone back to
stage_files       the blobs of one stage
loaded_stage      what a loader hands to a host
shards_here       of which stages the newest snapshot is on this peer

Words: a shard is one stage's part; a snapshot counts once every shard lies on two peers.
"""
