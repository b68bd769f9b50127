"""Weights in low precision: cast once a forward in training; cast, packed and folded once in a frozen model.

``FrozenWeights`` holds what a frozen model keeps.
Imports ``memory`` and what is below it.
"""
