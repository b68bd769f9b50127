"""Our keys of ``node.meta`` and of a graph's ``meta``, with the modules that write and read each.

Before: ``node.meta["amp_region"]`` in one file, ``node.meta[REGION]`` in another. After: one name per key, here.
The values in ``meta["val"]`` and ``meta["example_value"]`` are torch's, see ``fake_values.py``.
"""

from __future__ import annotations

# -- of a node as it was captured -------------------------------------------------------------------------

CAPTURED = "amp_captured"
"""The value as captured, before any pass. Written by ``adopt_values``, and for new nodes; read by ``captured``."""
MODULE = "amp_module"
"""Its module's path, as the user wrote it. Written by name_nodes, propagate_fake_values; read by ``module_path``."""
INPUT = "amp_input"
"""The name of an input, as the user wrote it. Written by name_nodes, step_graph; read by graph_text and reports."""
WISH = "amp_wish"
"""The precision that ``amp_graph.precision`` asks for, and why. Written by name_nodes; read by the planners."""
REGION = "amp_region"
"""Why a node inside a region of the user runs as captured. Written by ``mark_regions``; read by most passes."""
GRAD = "amp_grad"
"""Whether it runs with gradients enabled. Written by ``mark_regions``; read by ``is_trained``."""
TRANSFORM = "amp_transform"
"""It is inside a ``torch.func`` transform, and its value is invalid outside. Written by ``mark_regions``."""
CHECKPOINT = "amp_checkpoint"
"""The number of its activation checkpoint. Written by ``inline_checkpoints``; read by passes that move nodes."""
RETURNED = "amp_returned"
"""Storages of fake copies that are the value itself at run time. Written by no_op_dropout; read by aliasing."""

# -- of a node, by the passes -----------------------------------------------------------------------------

IDENTITY = "amp_ops"
"""The ATen operations that it calls, an ``Identity``. Written by identify_ops, and for new nodes by edit.

Read by ``names_of`` and ``operations_of``.
"""
CLASSIFIED = "amp_classified"
"""(lists, inputs, classification), a cache. Written and read by ``classify.classified``."""
MARK = "amp"
"""The planned precision and its reason, a ``Mark``. Written by plan_precision; read by insert_casts and reports."""
CAST = "amp_cast"
"""Why the cast was inserted. Written by insert_casts; read by passes that remove or move casts, and by reports."""
WRITTEN_OUT = "amp_written_out"
"""This attention call was a formula. Written by fuse_attention; read by the CPU's attention pass."""
SPARED = "amp_spared"
"""The bytes of the value that are not saved for backward. Written by recompute_activations; read by reports."""
SENT = "amp_sent"
"""What a collective sends for which unit, a ``Sent``. Written by the passes of sharding; read by reports."""

# -- of a graph -------------------------------------------------------------------------------------------

LOW_DTYPE = "amp_low"
"""The low dtype of the plan. Written by plan_precision; read by the step, for weights that are looked up."""
UNPLANNED = "amp_unplanned"
"""Why the graph has no plan, and how it runs. Written by autocast_fallback; read by reports."""
JOINT = "amp_joint"
"""Its loss, gradients and added inputs, a ``JointGraph``. Written and read by the passes of a step."""
WIDENED = "amp_widened"
"""Whether it runs in fp32 only because half operands were widened. Written by widen_halves; read by conversion."""
BUDGET = "amp_budget"
"""The ``Budget`` of the plan: allowed and predicted error. Written by plan_precision; read by reports."""
PREDICTED = "amp_predicted"
"""The predicted times of the plan. Written by plan_precision; read by reports."""
INSIDE = "amp_inside"
"""Where a body is in the graph around it, such as ``mixer.cond/0/``. Written by bodies; read by node_keys."""
UNCALIBRATED = "amp_uncalibrated"
"""A warning of operations that a calibration lacks, or "". Written by plan_precision; read by rewrite."""
UNKEPT = "amp_unkept"
"""The keys of ``keep_ops`` that no operation has, with the operations of their modules. Written by plan_precision."""
LEFT_ALONE = "amp_left_alone"
"""The prediction for which the whole graph stays fp32. Written by plan_precision; read by captures and reports."""
