"""Memory of a step: rematerialization, reuse of memory of gradients, pools without indices.

Each pass here trades time for memory, or reuses memory that would otherwise be mapped anew.
Imports ``layout`` and what is below it.
"""
