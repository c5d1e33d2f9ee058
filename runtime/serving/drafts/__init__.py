"""A draft model: a small model of the same vocabulary, with the first stage, that guesses where a text does not repeat itself.
What it says changes only time. Knows nothing of sessions' routes or of frames.

draft_files    the draft that a manifest names
draft_length   how far it is worth drafting; pure
drafter        what one session's draft has read, and what it guessed; pure
draft_model    the model in memory, in the device's thread
"""
