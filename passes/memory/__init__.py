"""Memory of a step: rematerialization, gradient accumulation in place, reuse of large buffers, huge pages.

Each pass here trades time for memory, or reuses memory that would be mapped anew.
Imports ``layout`` and what is below it.
"""
