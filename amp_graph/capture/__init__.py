"""Captures a model by TorchDynamo and runs what was captured: conversions, guards, graph breaks, recaptures.

``conversion`` is the state of a converted model; ``dynamo_backend`` rewrites what Dynamo hands over.
Imports ``passes``, ``optim`` and ``scaling``; ``convert``, ``step``, ``report`` and ``cli`` import from here.
"""
