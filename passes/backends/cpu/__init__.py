"""Rewrites to CPU kernels, one folder per kind of operator.

From the lowest: ``norm``, ``loss``; ``linear``, ``pointwise``; ``attention``, ``convolution``, ``inference``. Imports
every core room; nothing of ``cuda``, ``inductor`` or ``recurrent``.
"""
