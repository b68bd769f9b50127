"""Our keys of ``node.meta`` and of a graph's ``meta``, with the modules that write and read each.

Before: ``node.meta["amp_region"]`` in one file, ``node.meta[REGION]`` in another. After: one name per key, here.
The values in ``meta["val"]`` and ``meta["example_value"]`` are torch's, see ``fake_values.py``.
"""

from __future__ import annotations

# -- of a node as it was captured -------------------------------------------------------------------------

# The value as captured, before any pass. Written by ``adopt_values``, and for new nodes; read by ``captured``.
CAPTURED = "amp_captured"
# Its module's path, as the user wrote it. Written by name_nodes, propagate_fake_values; read by ``module_path``.
MODULE = "amp_module"
# The name of an input, as the user wrote it. Written by name_nodes, step_graph; read by graph_text and reports.
INPUT = "amp_input"
# The precision that ``amp_graph.precision`` asks for, and why. Written by name_nodes; read by the planners.
WISH = "amp_wish"
# Why a node inside a region of the user runs as captured. Written by ``mark_regions``; read by most passes.
REGION = "amp_region"
# Whether it runs with gradients enabled. Written by ``mark_regions``; read by ``is_trained``.
GRAD = "amp_grad"
# It is inside a ``torch.func`` transform, and its value is invalid outside. Written by ``mark_regions``.
TRANSFORM = "amp_transform"
# The number of its activation checkpoint. Written by ``inline_checkpoints``; read by passes that move nodes.
CHECKPOINT = "amp_checkpoint"
# Storages of fake copies that are the value itself at run time. Written by no_op_dropout; read by aliasing.
RETURNED = "amp_returned"

# -- of a node, by the passes -----------------------------------------------------------------------------

# The ATen operations that it calls, by ``Operation``. Written by identify_ops, and for new nodes by edit; read by
# ``names_of`` and ``operations_of``.
IDENTITY = "amp_ops"
# (lists, inputs, classification), a cache. Written and read by ``classify.classified``.
CLASSIFIED = "amp_classified"
# The planned precision and its reason, a ``Mark``. Written by plan_precision; read by insert_casts and reports.
MARK = "amp"
# Why the cast was inserted. Written by insert_casts; read by passes that remove or move casts, and by reports.
CAST = "amp_cast"
# This attention call was a formula. Written by fuse_attention; read by the CPU's attention pass.
WRITTEN_OUT = "amp_written_out"
# The bytes of the value that are not saved for backward. Written by recompute_activations; read by reports.
SPARED = "amp_spared"
# What a collective sends for which unit, a ``Sent``. Written by the passes of sharding; read by reports.
SENT = "amp_sent"

# -- of a graph -------------------------------------------------------------------------------------------

# The low dtype of the plan. Written by plan_precision; read by the step, for weights that are looked up.
LOW_DTYPE = "amp_low"
# Why the graph has no plan, and how it runs. Written by autocast_fallback; read by reports.
UNPLANNED = "amp_unplanned"
# Its loss, gradients and added inputs, a ``JointGraph``. Written and read by the passes of a step.
JOINT = "amp_joint"
# Whether it runs in fp32 only because half operands were widened. Written by widen_halves; read by conversion.
WIDENED = "amp_widened"
# The ``Budget`` of the plan: allowed and predicted error. Written by plan_precision; read by reports.
BUDGET = "amp_budget"
# The predicted times of the plan. Written by plan_precision; read by reports.
PREDICTED = "amp_predicted"
# Where a body is in the graph around it, such as ``mixer.cond/0/``. Written by bodies; read by node_keys.
INSIDE = "amp_inside"
# A warning of operations that a calibration lacks, or "". Written by plan_precision; read by rewrite.
UNCALIBRATED = "amp_uncalibrated"
# The keys of ``keep_ops`` that no operation has, with the operations of their modules. Written by plan_precision.
UNKEPT = "amp_unkept"
# The prediction for which the whole graph stays fp32. Written by plan_precision; read by captures and reports.
LEFT_ALONE = "amp_left_alone"
