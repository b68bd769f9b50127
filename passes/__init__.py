"""Graph passes, from a captured ``GraphModule`` to the rewritten one; ``pipeline_table`` lists all of them in order.

At the top: the contract of a pass (``base``), traits of functions that passes insert into graphs (``registry``), the
checker (``verify``) and the runner (``manager``). Each folder is a room for one subject.
A room imports only rooms below it, in the order that ``ROOMS`` in ``tests/test_rooms.py`` gives; none imports
``amp_graph`` outside of ``passes`` and ``lists``, and only ``pipeline_table`` imports ``backends``.
"""
