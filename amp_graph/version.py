"""The version of the installed package, which ``amp_graph.__version__`` and ``amp-graph --version`` give."""

from __future__ import annotations

from importlib import metadata

try:
    __version__ = metadata.version("amp-graph")
except metadata.PackageNotFoundError:  # the sources are on the path without an installation
    __version__ = "unknown"
