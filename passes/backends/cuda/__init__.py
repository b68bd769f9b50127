"""Rewrites for CUDA: padded shapes, batched counters, casts folded into reductions.

Only torch operations, no kernels of our own.
Imports only the core.
"""
