"""Helpers that read the arguments of attention, batch norm, dropout and transpose calls.

Each file covers all spellings of one operation, so that passes need no lists of their own.
Imports ``graph`` and rooms below it; all rooms above may import it.
"""
