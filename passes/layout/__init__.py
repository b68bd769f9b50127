"""Memory formats and contiguity: channels last, contiguous inputs of linears, casts moved through concatenations.

No values change here, only strides and the order of casts and copies.
Imports ``casts`` and what is below it.
"""
