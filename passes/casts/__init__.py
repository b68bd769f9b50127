"""Passes that insert, remove or share casts.

``insert_casts`` carries out the plan; ``eliminate_casts`` and ``share_casts`` leave one cast per value and dtype.
Imports ``precision`` and rooms below it.
"""
