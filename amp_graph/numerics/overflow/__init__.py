"""Locates the node that makes the first non-finite value of a step, and keeps the history of the loss scale.

``locate`` runs a recorded batch again with checks; ``locator`` watches a training, and locates its skipped steps.
Imports ``numerics``; ``report``, ``run`` and ``cli`` import from here.
"""
