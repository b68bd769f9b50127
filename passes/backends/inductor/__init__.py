"""What Inductor needs to compile a rewritten graph: options, gradient layouts, a GEMM template for small sizes.

``compile`` is the entry; the passes run on the graphs that AOTAutograd hands to Inductor.
Imports the core and ``backends/cpu/linear``.
"""
