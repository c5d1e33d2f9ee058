"""What the owner of the first stage does beside running it. The rules of a step are in `step`.

lead       the lead: progress and messages
step_times    how fast the job trains
snapshot_coordinator   the snapshot under way
leading    what the peer of stage 0 runs for the whole job
tuner      every few seconds: do the links ask for other codecs or a move
tuning     whether the codecs should change; pure
codec_speeds    how fast this machine encodes
moves      whether a stage should move to an idle peer; pure
promises   whether moves saved what they promised; pure
"""
