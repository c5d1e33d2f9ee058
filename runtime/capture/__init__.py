"""Captures a user's model as a graph, on the launching machine alone. Peers need none of it.

sources             opens a model: the built-in GPT, a Hugging Face directory, a GGUF file, an exported job
models              the built-in GPT
model_dtype         the dtype that a model runs in
encoder_decoder     an encoder-decoder's source, and the first tokens of its answers
text_encoder        embedding models, and their pooling
auto_classes        the auto class of transformers that builds a module
generation          generation settings: suppressed tokens, and settings that are not supported
huggingface         a language model in a directory
config_bounds       bounds on the sizes in a configuration
stored_config       the configuration and the tokenizer in a directory
packed_weights      weights that files hold quantised: GPTQ, AWQ and more
stored_weights      which tensors of the files make each tensor of a module
gguf/               GGUF files: metadata, tensors, tokenizer
gguf_model          a language model in a GGUF file
capture             a module as a graph, through torch.export, without its weights
exported_modules    the modules that torch.export runs
exporting/          patches for torch.export, and the line of an error
lowering/           an exported program in the op-set
rope                rotary positions whose frequencies depend on the length
quantised_weights   matrices as int8 and int4, quantised as they are read, or as a file has them
serving_graph       the graph that is served: KV cache, last position, fused norms
python/             a model that its trainer wrote in Python
trained_graph       the graph that is trained: experts as one op for each product
"""
