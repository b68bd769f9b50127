"""The command line, ``amp-graph``: one file a command, and what they share.

``main`` reads the arguments without importing torch.
Imports everything; nothing imports from here.
"""
