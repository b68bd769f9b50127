"""Graphs captured under ``torch.autocast``, and graphs that run under it because they cannot be planned.

What stands around a graph break is captured under autocast, and read here as if captured in fp32.
Imports ``op_args`` and what is below it; the planners and ``amp_graph`` import from here.
"""
