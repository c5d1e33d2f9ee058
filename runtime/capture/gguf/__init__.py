"""Reads GGUF files, within bounds, for transformers and our operators. Knows no model and no peers.

header       the header of a file: metadata, and the locations of its tensors
metadata     the metadata, key by key; every key has to be read
decoders     what decoders have in common
dense        architectures with one feed-forward network in each layer
gemma        the Gemmas
older        architectures from before Llama, and similar ones
mixtures     mixtures of experts
latent       multi-head latent attention
recurrent    layers with recurrent state
encoders     embedding models
config       the configuration of a file's model
blocks       quantised blocks, in the layout that our operators read
stored       how a file stores a parameter
tensors      maps tensors to parameters, and inverts what the conversion did to them
weights      reads tensors as a module's parameters
splitting    pre-tokenizers, by llama.cpp's names
tokenizer    the tokenizer as a tokenizer.json; the chat template
"""
