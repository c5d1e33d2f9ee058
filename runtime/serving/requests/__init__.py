"""Requests and completions, as clients and gateways exchange them. Loads no torch.

json_schema       the schema that constrains a completion; pure
ends              which tokens end a completion, and from which index on; pure
header_fields     checked fields of received messages, and token ids as bytes; pure
sampling_params   how each token is sampled; pure
request           the request, its pieces, its answer
prompt_logprobs   log-probabilities of a prompt's own tokens as bytes; pure
stop              stop strings; pure
chat_format       a model's chat template and special tokens
template_worker   a sandboxed process that renders chat templates
chat_template     a pool of those processes
chat_trial        a check of a chat template when a model is served
silence           liveness of a peer that has sent nothing for a while
client            the client of a gateway, with failover to another
"""
