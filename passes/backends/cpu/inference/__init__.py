"""Graphs without gradients: prepacked weights, folded batch norms, chunked upcasts, relu without NaN handling.

What is folded or packed is made anew when the weights that it was made of change.
Imports the core and ``backends/cpu/linear``.
"""
