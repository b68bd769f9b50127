"""Activations by lookup table, and dropout that saves one bit per element.

Passes, their functions with a backward, and the kernels.
Imports the core and ``backends/cpu/norm``.
"""
