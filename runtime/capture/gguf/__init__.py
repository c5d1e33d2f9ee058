"""GGUF files, read within bounds, as transformers and our operators want them. Knows no model and no peers.

header       what a file says, and where its tensors lie
config       what it says of its model, as transformers' configuration
blocks       its quantised blocks, as our operators read them
weights      its tensors as a module's parameters
tokenizer    its tokenizer as a tokenizer.json; its chat template
"""
