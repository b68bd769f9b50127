"""Triton kernels for CUDA, a pair of files each: the source, which imports triton, and what launches it.

Besides them, tables of addresses for kernels over many tensors. A source is imported when its kernel is first
launched: nothing here imports triton before.
Imports the core, and from ``backends/cpu`` the functions whose kernels these are on CUDA.
"""
