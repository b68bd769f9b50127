"""Captures a model with TorchDynamo and runs the captured graphs: conversions, guards, graph breaks, recaptures.

``conversion`` is the state of a converted model; ``dynamo_backend`` rewrites the graphs that Dynamo passes to it.
Imports ``passes``, ``optim`` and ``scaling``; ``convert``, ``step``, ``report`` and ``cli`` import from here.
"""
