"""The demo: what fp16 loses without a loss scale, and three models trained on real data, with and without amp_graph.

``make demo``, or in the root of the checkout ``python -m examples.demo``.
"""
