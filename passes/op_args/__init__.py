"""Reading the arguments of calls: attention, batch norm, dropout, and what is a transpose.

Each file knows the spellings of one operation, so that no pass has a list of its own.
Imports ``graph`` and what is below it; every room above may import from here.
"""
