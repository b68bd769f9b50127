"""Which modules of `amp_graph.passes` belong to backends: the core imports none of them."""

import pkgutil

from amp_graph import passes

PREFIX = "amp_graph.passes.backends"
# What puts the passes of all rooms together.
COMPOSITION = frozenset({"amp_graph.passes.pipeline_table"})
MODULES = frozenset(module.name for module in pkgutil.walk_packages(passes.__path__, "amp_graph.passes."))
BACKENDS = frozenset(name for name in MODULES if name.startswith(PREFIX))
CORE = sorted(MODULES - BACKENDS - COMPOSITION)


def is_of_backend(target):
    """Whether a node's target is a function of a backend's module."""
    return str(getattr(target, "__module__", "")).startswith(f"{PREFIX}.")
