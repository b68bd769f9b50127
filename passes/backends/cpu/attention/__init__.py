"""Scaled dot product attention by compiled C, forward and backward.

The pass, its functions with a backward, and the kernel.
Imports the core and ``backends/cpu/pointwise`` (dropout).
"""
