"""Rewrites for CUDA: padded shapes, by torch's operations.

Imports only the core.
"""
