"""Loss scaling as graph passes: each appends one part of a training step to a graph of forward and backward.

Contains the contract of such a graph (``joint_graph``), the passes, and their operators. It imports ``passes`` alone:
no optimizer, no model, nothing of ``amp_graph``'s own files outside of ``passes``.
"""

from amp_graph.passes.loss_scaling.average import AverageOverRanks, ClipGradients
from amp_graph.passes.loss_scaling.joint_graph import JointGraph, joint_of, name_exported, name_joint
from amp_graph.passes.loss_scaling.scale_loss import CheckFiniteAndUnscale, ScaleLoss, UpdateLossScale

__all__ = [
    "AverageOverRanks",
    "CheckFiniteAndUnscale",
    "ClipGradients",
    "JointGraph",
    "ScaleLoss",
    "UpdateLossScale",
    "joint_of",
    "name_exported",
    "name_joint",
]
