"""What Inductor needs to compile a rewritten graph: its options, and passes inside of it.

``compile`` is the entry; the passes run on the graphs that AOTAutograd hands to Inductor.
Imports the core and ``backends/cpu/linear``.
"""
