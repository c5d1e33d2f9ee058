"""Arithmetic on frozen values: graphs of operators, their stages, where these should run. No I/O, no asyncio, no torch.

ir/          a model as data: the graph, the op-set, its checks and its bytes
cutting/     stages, what crosses between them, what they cost
rewrites/    Graph -> Graph: KV cache, fused kernels, dead nodes
placement/   who runs what: the model of a step, OP-Fence, schedules, the simulator

Terms: an operator or node is a vertex of the graph; a stage, nodes that are run together; an edge, a value that crosses.
"""
