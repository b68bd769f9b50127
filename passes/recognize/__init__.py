"""Formulas written out in Python that become one call: GELU, RMS norm, attention, einsum. No-ops are removed.

Each file is one pattern and what replaces it; kernels for the replacement are a backend's.
Imports ``weights`` and what is below it.
"""
