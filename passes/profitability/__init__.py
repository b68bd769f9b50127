"""Thresholds: from which size, and on which machine, a rewrite is faster than what it replaces.

Each function answers one question for one pass; each number names the benchmark that it was read off.
Imports ``graph`` and what is below it; every pass may ask here.
"""
