"""Pattern matching: formulas written out in Python become one call (GELU, RMS norm, attention, einsum, ...).

Each file holds one pattern and its replacement, or removes one kind of no-op. Kernels live in the backends.
Imports ``weights`` and rooms below it.
"""
