"""Emulation of a GPU's fp16 on the CPU."""
