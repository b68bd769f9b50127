"""Low-precision copies of parameters: each weight is cast once per optimizer step.

The cache, detection of writes that the version counter misses, and the passes that read cached copies. Imports
``memory`` and what is below it.
"""
