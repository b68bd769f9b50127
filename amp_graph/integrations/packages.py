"""Says what to install where the package of an integration is missing.

Before: ``ModuleNotFoundError: No module named 'lightning'``. After: the same error, with the command that installs it.
"""

from __future__ import annotations


def missing(error: ModuleNotFoundError, package: str, needed_by: str) -> ModuleNotFoundError:
    """Return the error to raise for ``error``; ``error`` itself if ``package`` is there and something else is not."""
    module = package.replace("-", "_")
    if error.name is None or error.name.partition(".")[0] != module:
        return error
    return ModuleNotFoundError(
        f"{needed_by} needs the package {package}, which is not installed\n"
        f"  fix:   pip install {package}, or pip install 'amp-graph[integrations]'",
        name=error.name,
    )
