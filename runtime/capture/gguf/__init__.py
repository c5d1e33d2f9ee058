"""GGUF files, read within bounds, as transformers and our operators want them. Knows no model and no peers.

header       what a file says, and where its tensors lie
metadata     what it says, key by key
decoders     what decoders have in common, as transformers' configurations have it
dense        the architectures with one feed-forward network a layer
gemma        the Gemmas
older        those of before Llama, and what is like them
mixtures     those with experts
latent       those whose keys and values come of a short vector
recurrent    those that keep a state
encoders     those that make a vector of a text
config       the configuration of a file's model
blocks       its quantised blocks, as our operators read them
stored       a parameter, as the file has it
tensors      which tensors are which parameters, and what the conversion did to them
weights      its tensors, read as a module's parameters
splitting    how text is cut before bytes are merged, by the names of llama.cpp
tokenizer    its tokenizer as a tokenizer.json; its chat template
"""
