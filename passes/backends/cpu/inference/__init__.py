"""Graphs without gradients: prepacked weights, folded batch norms, chunked upcasts, relu without NaN handling.

Folded and packed weights are made anew when the original weights change.
Imports the core and ``backends/cpu/linear``.
"""
