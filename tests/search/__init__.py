"""Tests of ``amp_graph.search``."""
