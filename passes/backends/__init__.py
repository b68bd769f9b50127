"""Device- or compiler-specific code: passes that lower to its kernels, the kernels, and functions with a backward.

``lower_x`` and ``fuse_x`` are passes, ``x_functions`` what the graph then calls, ``x_kernel`` the compiled code; what
is short stands in the file of its pass.
Imports every core room; no core file but ``pipeline_table`` imports from here. ``skip=backend`` leaves out all of it.
"""
