"""What is asked and what is answered, for whoever asks. Loads no torch.

json_schema       the schema that an answer has to follow; pure
ends              which tokens end an answer, and from when on; pure
header_fields     fields of messages from outside, and token ids as bytes; pure
sampling_params   how each token is chosen; pure
request           what a client asks, and what it gets
prompt_logprobs   log-probabilities of a prompt's own tokens as bytes; pure
stop              texts that end an answer; pure
chat_format       how a model is chatted with
template_worker   a process that renders chat templates and can do nothing else
chat_template     those processes
chat_trial        a template tried before anybody chats
silence           whether a peer that sends nothing is there
client            asking any peer, and another where it vanishes
"""
