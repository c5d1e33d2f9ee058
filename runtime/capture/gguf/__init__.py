"""Reads GGUF files, within bounds, as transformers and our operators take them. Knows no model and no peers.

header       metadata of a file, and the places of its tensors
metadata     the metadata, key by key; every key has to be read
decoders     what decoders have in common
dense        the architectures with one feed-forward network a layer
gemma        the Gemmas
older        those from before Llama, and similar ones
mixtures     mixtures of experts
latent       those with latent attention
recurrent    those with recurrent state
encoders     embedding models
config       the configuration of a file's model
blocks       quantised blocks, as our operators read them
stored       a parameter, as the file has it
tensors      maps tensors to parameters, and undoes what the conversion did to them
weights      reads tensors as a module's parameters
splitting    pre-tokenizers, by the names of llama.cpp
tokenizer    the tokenizer as a tokenizer.json; the chat template
"""
