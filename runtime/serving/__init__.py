"""Answers. Any peer is a gateway; a session runs around the ring of stages. Knows nothing of training or of claiming.

requests/      what a client asks, and what it gets
grammar/       answers held to a JSON schema
drafts/        a small model that guesses for a large one
ring/          the stages' side of a session
answers/       the gateway's side
graphs/        models that answer in one run
http/          OpenAI's API, for programs that are no peers
draft_loader   draft models on their way into memory
loaded_stage   a stage in memory
stage_blobs    what a stage needs, on this disk, and how far it is on its way
stage_loader   stages on their way into memory
service        models that generate on this peer: stages in memory, replicas, the gateway
models         those, and models that answer in one run
"""
