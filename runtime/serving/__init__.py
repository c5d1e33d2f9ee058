"""Answers. Any peer is a gateway; a session runs around the ring of stages. Knows nothing of training or of claiming.

request           what a client asks, and what it gets; loads no torch
client            asking any peer, and another where it vanishes
gateway           requests and clients
catalog           which models are served, and by whom
route_choice      which holder of each stage; pure
generation        one answer, whatever happens to the stages
failover          whose fault it is, and what to do; pure
pace              whether tokens come clearly slower; pure
gateway_session   sessions as a gateway holds them
ring_link         the long-lived streams of the ring
session           one generation as the stages see it: what runs next; pure
ring              one stage: its place in the ring
ring_frames       what one stage sends another
stage_session     one session at one stage, in the worker thread
sampling          from logits to a token
stage_loader      stages on their way into memory
service           serving on this peer: stages in memory, replicas, the gateway

Words: a route is one holder for each stage; prefill runs the prompt, in chunks, decode token by token; the ring, the trip of a token.
"""
