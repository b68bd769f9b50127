"""``TrainStep``: forward, backward and update as one graph.

``trace_step`` makes the graph, ``step_cache`` keeps one for each kind of batch, ``train_step`` is what users call.
Imports ``capture``, ``optim`` and ``scaling``; ``report`` and ``cli`` import from here.
"""
