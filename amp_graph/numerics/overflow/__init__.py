"""Locates the node that makes the first non-finite value of a step, and keeps the history of the loss scale.

``locate`` runs a batch with checks; ``scale_history`` tells of the scale of each step.
Imports ``numerics``; ``report``, ``run`` and ``cli`` import from here.
"""
