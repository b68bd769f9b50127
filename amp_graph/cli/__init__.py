"""The command line, ``amp-graph``: one file per command, and shared parts.

``main`` reads the arguments without importing torch.
Imports everything; nothing imports from here.
"""
