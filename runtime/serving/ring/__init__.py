"""What the stages of a served model do for one session after another. Knows nothing of who chose the route.

prefix           the beginning of a sequence, by a hash for each block; pure
guesses          tokens that are guessed, and what becomes of that; pure
session          one generation as the stages see it: what it is told once, what runs next; pure
links            the long-lived streams of the ring
frames           what one stage sends another
batches          what a turn has to say over a link, in one frame
penalties        what settings and the tokens so far do to the logits
constraint       which tokens a schema allows next
sampling         from logits to a token
fair_turns       whose chunks run first; pure
schedule         which sessions are taken, what a turn runs; pure
openings         how many sessions a gateway may open; pure
retained         what is kept of sessions that have ended, and what of it gives way; pure
stage_session    one session at one stage, in the worker thread
drafting         the draft model of the first stage: when it runs, and for whom
stage_memory     the memory of all of them: set aside, retained, freed
stage_sessions   all of them: opened, failed, dropped
gateways         what gateways say
stage            one stage: its place in the ring

Words: prefill runs the prompt, in chunks, decode token by token; the ring, the trip of a token.
"""
