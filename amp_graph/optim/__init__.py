"""Updates of parameters by torch's fused kernels, fp32 master weights, checks of optimizers and their state.

Nothing here is public.
Imports ``passes`` and the top of ``amp_graph``; ``scaling``, ``capture`` and ``step`` import from here.
"""
