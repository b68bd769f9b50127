"""Low-precision copies of parameters: each weight is cast once per optimizer step.

The cache, who writes to a parameter behind its version counter, and the passes that read copies.
Imports ``memory`` and what is below it.
"""
