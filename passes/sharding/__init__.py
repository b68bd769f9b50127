"""Sharded parameters: the collectives of ``fully_shard``'s units as nodes of the joint graph of a training step.

The graph is captured and planned as if nothing was sharded. Then ``round_lookups`` lets embeddings read low tables,
``shard_parameters`` gathers shards before their readers, in the dtypes of the plan, and ``scatter_gradients`` reduces
gradients to shards and has ranks agree on them.
It imports ``passes`` alone: nothing here knows FSDP.
"""
