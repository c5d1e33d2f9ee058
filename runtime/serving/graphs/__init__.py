"""Models that run once for each request and do not generate: named arrays in, named arrays out, stage after stage.

arrays       named arrays in a frame
inputs       validation of a model's inputs; pure
client       the client of a gateway, with failover to another
stages       the stages that run here
owners       runs a stage at its owner, or its next owner
gateway      in front of the stages of the swarm
embeddings   vectors of texts, through it

A run has no state: where a stage's owner fails, its next owner gets the same arrays.
"""
