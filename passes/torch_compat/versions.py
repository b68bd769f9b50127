"""The running version of torch, and what depends only on it.

Each states the versions of torch that it was checked on.
"""

from __future__ import annotations

import functools

import torch

from amp_graph.lists.errors import warn

NEWEST_CHECKED = (2, 13)


def torch_version() -> tuple[int, ...]:
    """Return torch's version, major and minor."""
    return tuple(map(int, torch.__version__.split(".")[:2]))


@functools.cache
def tell_of_newer_torch() -> None:
    """Warn, once in a process, of a torch that is newer than any that the names of this folder were checked on."""
    if torch_version() > NEWEST_CHECKED:
        newest = ".".join(map(str, NEWEST_CHECKED))
        warn(
            f"amp_graph: torch {torch.__version__} is newer than {newest}, the newest version that this amp_graph was "
            "checked on: what relies on torch's private names may be left out\n"
            f'  fix:   pip install "torch<2.{NEWEST_CHECKED[1] + 1}", or a newer amp_graph, if anything differs'
        )


def keeps_lstm_workspaces() -> bool:
    """Say whether the workspace of oneDNN's LSTM survives a compiler: in 2.11 gradients were garbage."""
    return torch_version() >= (2, 13)
