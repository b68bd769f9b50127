"""Convolutions and their gradients: pointwise, depthwise, transposed and one-dimensional.

Each pass replaces calls with functions whose gradients are matmuls or compiled C.
Imports the core, ``backends/cpu/linear`` and ``backends/cpu/norm``.
"""
