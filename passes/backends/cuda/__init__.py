"""Rewrites for CUDA: linears and convolutions of padded shapes.

Everything calls torch's operations.
Imports only the core.
"""
