"""Draft models for speculative decoding: a small model of the same vocabulary, beside the first stage, that guesses where a text does
not repeat itself. Knows nothing of routes or frames.

draft_files    the files of a draft model in a manifest
draft_length   how many tokens to draft; pure
drafter        the draft of one session: what it has read and guessed; pure
draft_model    the draft model in memory, in the device's thread
"""
