"""Activations by lookup table, and dropout that keeps one bit an element.

Passes, their functions with a backward, and the kernels.
Imports the core and ``backends/cpu/norm``.
"""
