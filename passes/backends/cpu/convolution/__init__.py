"""Convolutions and their gradients: pointwise, depthwise, transposed and one-dimensional.

Each pass retargets calls to functions whose gradients are matrix products or compiled C.
Imports the core, ``backends/cpu/linear`` and ``backends/cpu/norm``.
"""
