"""Linears and other matmuls: panel GEMM, AMX GEMM, and the passes that lower calls to them.

``lower_linears`` has the backward of each; ``panel_gemm`` and ``amx_gemm`` are the kernels.
Imports the core and ``backends/cpu/norm``.
"""
