"""Graphs captured under ``torch.autocast``, and graphs that run under it because they cannot be planned.

The partial graphs around a graph break are captured under autocast; this room converts them to fp32 captures.
Imports ``graph`` and rooms below it; the planners and ``amp_graph`` import it.
"""
