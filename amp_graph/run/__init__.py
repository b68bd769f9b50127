"""``amp-graph run``: runs an unmodified training script, and converts the models that it trains.

``script`` loads and runs it as Python does, ``trained_models`` sees its models' calls and decides, ``conversions``
converts, ``loss_scaling`` scales losses where that is to fp16, by ``scaled_backward``. ``amp_graph.convert`` and Dynamo
are imported when the first model is converted.
Imports ``convert``, ``capture`` and ``report``, and everything below; only ``cli`` imports from here.
"""
