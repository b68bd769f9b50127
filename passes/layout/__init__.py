"""Memory formats and contiguity: channels last, contiguous inputs of linears, casts moved before concatenations.

These passes change no values, only strides and the order of casts and copies.
Imports ``casts`` and rooms below it.
"""
