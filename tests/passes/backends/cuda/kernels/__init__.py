"""Triton kernels against torch: interpreted on the CPU with TRITON_INTERPRET=1 (``make test-triton``), or on a GPU."""
