"""The version of the installed package, which ``amp_graph.__version__`` and ``amp-graph --version`` give."""

from __future__ import annotations

from importlib import metadata


def version() -> str:
    """Return the installed version; "unknown" where the sources are on the path without an installation."""
    try:
        return metadata.version("amp-graph")
    except metadata.PackageNotFoundError:
        return "unknown"
