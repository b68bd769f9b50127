"""Everything that inserts, removes or shares a cast.

``insert_casts`` carries out the plan; ``eliminate_casts`` and ``share_casts`` leave one cast for each value and dtype.
Imports ``precision`` and what is below it.
"""
