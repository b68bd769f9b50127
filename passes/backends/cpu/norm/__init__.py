"""Batch norm, group norm, and layer norm fused with the addition before it, in compiled C.

Passes, functions with a backward, kernels, and how their results are computed again in backward.
Imports the core alone.
"""
