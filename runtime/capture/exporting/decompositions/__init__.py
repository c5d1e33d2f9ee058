"""Decompositions of operators that torch lacks, or has in a form that the op-set cannot express.

table       the decomposition of each operator, and remedies for operators that are refused
ordered     medians, running maxima
scattered   reductions into positions that an index names
matrices    determinants, inverses, solutions, Cholesky factors
special     log-gamma and its derivative, sinc
"""
