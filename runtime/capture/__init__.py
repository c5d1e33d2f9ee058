"""Captures a user's model as a graph, on the launching machine alone. Peers need none of it.

sources             opens a model: the built-in GPT, a Hugging Face directory, a GGUF file, an exported job
models              the built-in GPT
model_dtype         the dtype that a model runs in
encoder_decoder     an encoder-decoder's source, and how its answers begin
text_encoder        embedding models, and their pooling
auto_classes        which class of transformers makes the module
generation          generation settings, and those that answers do not follow
huggingface         a language model in a directory
config_bounds       bounds on what a configuration may ask for
stored_config       the configuration and the tokenizer in a directory
packed_weights      weights that files hold quantised: GPTQ, AWQ and more
stored_weights      where its files hold each tensor, whole or in pieces
gguf/               GGUF files: what they say, their tensors, their tokenizer
gguf_model          a causal language model in a GGUF file
capture             a module as a graph, through torch.export, without its weights
exporting/          patches for torch.export, and the line of an error
lowering/           an exported program in the op-set
rope                rotary positions whose frequencies depend on the length
quantised_weights   matrices as int8 and int4, made as they are read, or as a file has them
serving_graph       the graph that is served: KV cache, last position, fused norms
python/             a model that its trainer wrote in Python
trained_graph       the graph that is trained: experts as one op a product
"""
