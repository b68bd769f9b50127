"""Graph passes: a ``GraphModule`` in, a ``PassResult`` out; one pass a file."""
