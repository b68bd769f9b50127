"""The keys of ``node.meta``, and of a graph's ``meta``, that are ours: who writes each, and who reads it.

Before: ``node.meta["amp_region"]`` in one file, ``node.meta[REGION]`` in another. After: one name a key, defined here.
The values in ``meta["val"]`` and ``meta["example_value"]`` are torch's, see ``fake_values.py``.
"""

from __future__ import annotations

from amp_graph.passes.torch_compat.dynamo_patches import DTYPE_READ as DTYPE_READ

# -- of a node as it was captured -------------------------------------------------------------------------

CAPTURED = "amp_captured"
"""The value as captured, before any pass. Written by ``adopt_values``, and for new nodes; read by ``captured``."""
MODULE = "amp_module"
"""The path of its module, as the user writes it. Written by name_nodes, inline_modules; read by ``module_path``."""
INPUT = "amp_input"
"""The name of an input, as the user writes it. Written by name_nodes, step_graph; read by text and reports."""
WISH = "amp_wish"
"""The precision that ``amp_graph.precision`` asks for, and why. Written by name_nodes; read by the planners."""
REGION = "amp_region"
"""What to say of a node inside of the user's ``torch.autocast``. Written by ``mark_regions``; read by most passes."""
GRAD = "amp_grad"
"""Whether it runs with gradients enabled. Written by ``mark_regions``; read by ``is_trained``."""
TRANSFORM = "amp_transform"
"""It is inside of a ``torch.func`` transform, and means nothing outside. Written by ``mark_regions``."""
CHECKPOINT = "amp_checkpoint"
"""The number of its activation checkpoint. Written by ``inline_checkpoints``; read by what moves or joins nodes."""
GIVEN = "amp_given"
"""The low-precision value that it has whatever the plan says. Written by pieces, low_by_user; read by the planners."""
TAKES = "amp_takes"
"""The inputs of a call that runs as captured that were low then. Written by pieces; read by insert_casts."""
LEAVES = "amp_leaves"
"""The dtypes, or None, in which the leaves of an output have to leave the graph. Written and read by pieces."""
RETURNED = "amp_returned"
"""Storages of fake copies of the value, which are the value itself when run. By drop_dropout; read by memory."""

# -- of a node, by the passes -----------------------------------------------------------------------------

IDENTITY = "amp_ops"
"""The ATen operations that it calls, an ``Identity``. Written by identify_ops, and for new nodes by editing.

Nodes of one key share it: it holds no integers of a node's own, see ``identify_ops.OwnNumber``. Read by ``names_of``.
"""
CLASSIFIED = "amp_classified"
"""(lists, inputs, classification), so that a graph is classified once. Written and read by ``classify.classified``."""
MARK = "amp"
"""The planned precision and its reason, a ``Mark``. Written by plan_precision; read by insert_casts and reports."""
CAST = "amp_cast"
"""Why the cast is there. Written by insert_casts; read by what makes casts fewer, and by reports."""
WRITTEN_OUT = "amp_written_out"
"""This call of attention was a formula. Written by fuse_attention; read by the CPU's attention."""
SPARED = "amp_spared"
"""The bytes of the value that are not saved for backward. Written by recompute_activations; read by reports."""
TURNED = "amp_turned"
"""Whether the weight that is packed is [inputs, outputs]. Written by pack_weights; read by widen_products."""
ASKED = "amp_asked"
"""Whether it is noted if a packed weight is finite. Written by pack_weights; read by look_at_values."""
CASTS_INSIDE = "amp_casts_inside"
"""Why a call casts the parameters that it is given, by node. Written by linears_of_parameters; read by reports."""

# -- of a graph -------------------------------------------------------------------------------------------

UNPLANNED = "amp_unplanned"
"""Why the graph has no plan, and how it runs. Written by autocast_graph; read by reports."""
JOINT = "amp_joint"
"""Which nodes are its loss, gradients and added inputs, a ``JointGraph``. Written and read by the passes of a step."""
PIECE = "amp_piece"
"""It was captured under ``torch.autocast``. Written by pieces; read by the planners."""
RAISES = "amp_raises"
"""Whether code that read a dtype raises values that are planned low. Written by plan_precision; read by read_dtypes."""
BUDGET = "amp_budget"
"""What the plan spent of the error budget. Written by plan_precision; read by reports."""
PREDICTED = "amp_predicted"
"""The predicted times of the plan. Written by plan_precision; read by reports."""
LEFT_ALONE = "amp_left_alone"
"""The prediction by which the whole graph stays fp32. Written by plan_precision; read by captures and reports."""
