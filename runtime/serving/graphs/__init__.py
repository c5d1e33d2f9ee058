"""Models that answer in one run, and generate nothing: named arrays in, named arrays out, stage after stage.

arrays       named arrays in a frame
inputs       whether they are what a model takes; pure
client       ask any peer, or another one
stages       the stages that run here
owners       the owner of a stage is asked, or the next one
gateway      in front of the stages of the swarm
embeddings   vectors of texts, through it

A run keeps nothing: where a stage's owner vanishes, the next one is given the same arrays.
"""
