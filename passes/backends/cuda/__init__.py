"""Rewrites for CUDA: padded shapes, batched counters, casts folded into reductions.

Plain torch operations, no kernels.
Imports the core alone.
"""
