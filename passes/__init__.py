"""The compiler: graph passes, the table that orders them, the runner, and the checker.

``base`` is the contract of a pass, ``pipeline_table`` the order of all passes, ``manager`` runs them and ``verify``
checks each. Imports ``amp_graph.lists`` and nothing else of ``amp_graph``.
"""
