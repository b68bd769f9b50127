"""C at run time: the compiler, the cache of compiled libraries, shared headers, operators, and casts of memory.

Each function has a form in torch's own operations, for machines without a C compiler.
Imports ``torch_compat`` alone; headers here may be included by the C of every backend.
"""
