"""Read and edit a captured graph: operator identity, node values, aliasing, liveness, text.

Nothing here depends on precision. ``meta_keys`` defines the keys of ``node.meta`` that several rooms read.
Imports ``base``, ``torch_compat`` and ``native``; all rooms above may import it.
"""
