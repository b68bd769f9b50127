"""Passes that insert, remove or share casts.

``insert_casts`` carries out the plan; ``eliminate_casts`` and ``share_casts`` leave one cast per value and dtype.
``product_precision`` compares what products run in with the plan.
Imports ``precision`` and rooms below it.
"""
