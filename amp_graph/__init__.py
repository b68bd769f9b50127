"""Automatic mixed precision for PyTorch as a graph pass: what runs in which precision, and why.

>>> import amp_graph
>>> model = amp_graph.convert(model)
>>> print(amp_graph.report(model).text())
"""

from amp_graph.convert import convert as convert
from amp_graph.convert import revert as revert
from amp_graph.errors import AmpGraphError as AmpGraphError
from amp_graph.policy import Policy as Policy
from amp_graph.report import report as report
from amp_graph.rewrite import rewrite as rewrite

__all__ = ["AmpGraphError", "Policy", "convert", "report", "revert", "rewrite"]
