"""JIT compilation of C: the compiler, the library cache, shared headers, operator registration, and cast kernels.

Each function falls back to torch operations on machines without a C compiler.
Imports only ``torch_compat``; the C sources of every backend may include the headers here.
"""
