"""Answers held to a JSON schema: which tokens may come next, worked out in processes that can be ended.

worker      one of these processes: llguidance, for one model
matcher     one answer's end of its connection to it
grammars    the processes of a peer: begun, counted, ended

Words: a grammar is a schema compiled for the tokens of a model; a mask, the tokens that may come next.
"""
