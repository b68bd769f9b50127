"""Records forward and backward of captured graphs as CUDA graphs, and replays them in the user's own training loop.

``trace_flat`` traces a captured graph with its backward into two graphs of ATen calls; ``eligibility`` says what must
not be recorded; ``recorder`` records and replays; ``slots`` own the memory; ``guard_set`` decides call by call.
Imports ``passes`` and ``policy``; ``capture`` imports from here.
"""
