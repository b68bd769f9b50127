"""The demo: three models trained on real data, with and without amp_graph, and a fourth without and with loss scale.

``amp-graph demo`` and ``python -m amp_graph.demo`` call ``main``.
Imports what users import, and ``report``; only the command line imports from here.
"""

from amp_graph.demo.run import main as main

__all__ = ["main"]
