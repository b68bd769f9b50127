"""Reading and editing a captured graph: identity of operators, values of nodes, aliasing, liveness, text.

Nothing here knows of precision. Keys of ``node.meta`` that several rooms read are in ``meta_keys``.
Imports ``base``, ``torch_compat`` and ``native``; every room above may import from here.
"""
