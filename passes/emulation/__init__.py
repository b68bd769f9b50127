"""Emulation of a GPU's arithmetic on the CPU: which calls are replaced, and what computes in their place.

Before: ``linear(x_fp16, w_fp16)`` by whatever fp16 kernel this CPU has. After: ``emulated_linear(x_fp16, w_fp16)``,
which sums in fp32 and rounds its result to fp16 once, as the GPU's kernel does.
"""
