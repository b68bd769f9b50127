"""Cross entropy of low-precision logits, fused with the linear before it.

Passes, functions with a backward, and the kernel.
Imports only the core.
"""
