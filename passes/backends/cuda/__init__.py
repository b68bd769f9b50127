"""Rewrites for CUDA: padded shapes, batched counters, casts folded into reductions, gradients of embeddings.

Kernels of our own are in ``kernels``; all else calls torch's operations.
Imports only the core.
"""
