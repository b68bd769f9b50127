"""Thresholds: the sizes and machines for which a rewrite is faster than the code that it replaces.

Each function answers one question for one pass. Each docstring gives the measurements behind its numbers.
Imports ``graph`` and rooms below it; any pass may import it.
"""
