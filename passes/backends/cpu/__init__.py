"""Rewrites to kernels for the CPU, one folder a kind of operator.

From the lowest: ``norm``, ``loss``; ``linear``, ``pointwise``; ``attention``, ``convolution``, ``inference``.
Imports every core room; nothing of ``cuda``, ``inductor`` or ``recurrent``.
"""
