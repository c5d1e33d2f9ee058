"""Constrained decoding by a JSON schema: token masks, computed in processes that can be killed.

worker      such a process: llguidance, for one model
matcher     the client side of one completion's connection to it
grammars    the processes of a peer: started, counted, ended

Words: a grammar is a schema compiled for the tokens of a model; a mask, the tokens that may come next.
"""
