"""Somebody's model as a graph, on the launching machine alone. Peers need none of it.

sources             where a model comes from: the built-in GPT, a Hugging Face directory, a GGUF file, an exported job
models              the built-in GPT
model_dtype         the dtype that a model runs in
encoder_decoder     what an encoder-decoder reads, and what its answers follow
text_encoder        models that make a vector of a text, and how they pool
auto_classes        which class of transformers makes the module
generation          what a directory says of how its model generates, and what answers do not follow
huggingface         a language model in a directory
config_bounds       how much its configuration may ask for
stored_config       the configuration and the tokenizer in a directory
packed_weights      those that a directory's files hold quantised by others: GPTQ, AWQ and more
stored_weights      where its files hold each tensor, whole or in pieces
gguf/               GGUF files: what they say, their tensors, their tokenizer
gguf_model          a causal language model in a GGUF file
capture             a module as a graph, through torch.export, without its weights
exporting/          what torch runs while it exports a module, and which line
lowering/           an exported program in the op-set
rope                rotary positions whose frequencies depend on the length
quantised_weights   matrices as int8 and int4, made as they are read, or as a file has them
serving_graph       the graph that is served: KV cache, last position, fused norms
python/             a model that its trainer wrote in Python
trained_graph       the graph that is trained: experts as one op a product
"""
