"""Where swarm, graphs and codecs meet: jobs, from somebody's model to weights and answers.

device/     what jobs get of a device
job/        what all rooms share: manifest, context, progress, protocols
belief/     what of all that is said of jobs to believe
planes/     what runs stages on a device
capture/    somebody's model as a graph
datasets/   somebody's samples as named arrays
placing/    which peers and which codecs, from what the swarm knows
launch/     a job handed to the swarm, and taken home
training/   remote autodiff and the commit protocol
serving/    the gateway and the ring
hosting/    which stages this peer claims, stands by for and hands over
peer/       one peer put together

Words: a job is a manifest that the swarm trains or serves; its lead, the owner of the first stage.
"""
