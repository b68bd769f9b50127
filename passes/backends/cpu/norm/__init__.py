"""Batch norm, group norm, and layer norm fused with the addition before it, in compiled C.

Passes, functions with a backward, kernels, and how their results are recomputed in backward.
Imports only the core.
"""
