"""Weights in low precision: cast once a forward in training; cast, packed and folded once in a frozen model.

Imports ``memory`` and what is below it.
"""
