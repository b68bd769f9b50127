"""Graph passes, from a captured ``GraphModule`` to the rewritten one; ``pipeline`` has all of them, in order.

At the top: the contract of a pass (``base``), traits of functions that passes put into graphs (``registry``), the
checker (``verify``) and the runner (``manager``). Each folder is a room of one subject.
A room imports only rooms below it, in the order that ``ROOMS`` in ``tests/test_rooms.py`` gives; none imports
``amp_graph`` outside of ``passes`` and ``lists``, and only ``pipeline`` imports ``backends``.
"""
