"""The stages of a served model, as they run sessions. Knows nothing of how a route is chosen.

prefix           prefixes of a sequence, as a hash chain of its blocks; pure
guesses          speculative tokens, and their acceptance; pure
session          one generation as the stages see it: its opening, and its next chunk; pure
links            the long-lived streams of the ring
frames           the payload of a chunk between two stages
batches          several frames of a turn over one link, in one frame
penalties        logit bias and penalties
constraint       which tokens a schema allows next
sampling         from logits to a token
fair_turns       fair scheduling between users; pure
schedule         admission of sessions, and what a turn runs; pure
openings         rate limit of session openings, frames that arrive early; pure
retained         the prefix cache: retained sequences and their eviction; pure
stage_session    one session at one stage, in the worker thread
drafting         the draft model of the first stage: when it runs, and for which sessions
stage_memory     the device memory of sessions: reserved, retained, freed
stage_sessions   the sessions of a stage: opened, failed, dropped
gateways         the frames of gateways
stage            one stage: its place in the ring

Words: prefill runs the prompt, in chunks, decode token by token; a turn is one batch of chunks; the ring, the trip of a token.
"""
