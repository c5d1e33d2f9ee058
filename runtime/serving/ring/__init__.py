"""What the stages of a served model do for one session after another. Knows nothing of who chose the route.

session          one generation as the stages see it: what it is told once, what runs next; pure
links            the long-lived streams of the ring
frames           what one stage sends another
penalties        what settings and the tokens so far do to the logits
sampling         from logits to a token
schedule         which sessions are taken, what a turn runs; pure
openings         how many sessions a gateway may open; pure
stage_session    one session at one stage, in the worker thread
stage_sessions   all of them: opened, failed, freed
gateways         what gateways say
stage            one stage: its place in the ring

Words: prefill runs the prompt, in chunks, decode token by token; the ring, the trip of a token.
"""
