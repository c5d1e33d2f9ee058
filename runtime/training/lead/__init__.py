"""What the owner of the first stage does beside running it. The rules of a step are in `step`.

lead       the lead's books and messages
step_times    how fast the job trains
snapshot_coordinator   the snapshot that the stages are making
leading    what the peer of stage 0 does for the whole job
tuner      its eye on the links, every few seconds
tuning     whether the codecs should change; pure
codec_speeds    how fast this machine encodes
moves      whether a stage should go to an idle peer; pure
promises   what became of the moves: who is believed no more; pure
"""
