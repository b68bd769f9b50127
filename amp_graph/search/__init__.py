"""``amp_graph.search``: the fastest precision that is exact enough, found by measuring on the machine at hand.

``space`` predicts the plans that are worth trying, ``proposals`` chooses the next one from what was measured, ``bench``
measures one, ``search`` is the loop, and ``result`` what it returns.
Imports ``report`` and below; ``cli`` imports from here.
"""
