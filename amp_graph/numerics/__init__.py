"""Numerics that one can trust and debug: ranges of values, errors of a plan, where an overflow began.

``calibrate`` measures the ranges of values, which a policy reads; ``compare`` measures a plan's error layer by layer;
``bisect`` finds the operations to keep full; ``locate`` names the operation that made the first non-finite value.
Imports ``amp_graph.convert``, ``amp_graph.step`` and below; ``amp_graph.report`` and ``amp_graph.cli`` may import it.
"""
