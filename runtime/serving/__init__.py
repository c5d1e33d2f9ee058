"""Inference. Any peer is a gateway; a session runs around the ring of stages. Knows nothing of training or of claiming.

requests/      requests and completions
grammar/       completions constrained by a JSON schema
drafts/        a draft model, for speculative decoding
ring/          the stages' side of a session
answers/       the gateway's side
graphs/        models that run once for each request
http/          OpenAI's API, for programs that are not peers
draft_loader   loads draft models
loaded_stage   a stage in memory
stage_blobs    fetches the blobs of a stage
stage_loader   loads stages
service        generating models on this peer: stages in memory, replicas, the gateway
models         those, and models that run once for each request
"""
