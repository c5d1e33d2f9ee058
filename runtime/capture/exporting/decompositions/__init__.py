"""Operators that torch takes apart otherwise than the op-set can say.

table       which operators these are, and what each is made of; what else is refused says why
ordered     medians, the largest so far
scattered   reductions at places that an index names
matrices    determinants, inverses, solutions, Cholesky factors
special     the gamma function's logarithm and its derivative, sinc
"""
