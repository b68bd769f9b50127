"""Graphs that run under ``torch.autocast`` because they cannot be planned.

``autocast_fallback`` puts the operations of such a graph into a region of autocast.
Imports ``graph`` and rooms below it; the planners and ``amp_graph`` import it.
"""
