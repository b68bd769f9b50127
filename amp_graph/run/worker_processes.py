"""Counts the processes that a script starts by ``multiprocessing``: nothing is converted in them.

``Workers().lines()``: "left as written: what 2 worker processes train, started at main.py:30; ...".
"""

from __future__ import annotations

import functools
import multiprocessing
import multiprocessing.process
from collections import Counter
from typing import Any

from amp_graph.run.call_site import site_of_call

LOADERS = "torch.utils.data"  # they load data, and train nothing


class Workers:
    """The processes that were started from now on."""

    def __init__(self) -> None:
        """Count the processes from now on."""
        self.found: Counter[tuple[bool, str]] = Counter()  # by whether they are forked, and the line
        plain = multiprocessing.process.BaseProcess.start

        @functools.wraps(plain)
        def start(process: Any) -> None:
            target = getattr(process, "_target", None)  # gone once it is started
            plain(process)
            if not getattr(target, "__module__", "").startswith(LOADERS):
                self.found[_is_forked(process), site_of_call()] += 1

        multiprocessing.process.BaseProcess.start = start  # type: ignore[assignment, method-assign]

    def lines(self) -> list[str]:
        """Return a line for each place that started processes."""
        return [_line(count, forked, site) for (forked, site), count in self.found.items()]


def _is_forked(process: Any) -> bool:
    """Return whether ``process`` begins with a copy of this one's memory, and of the models that are converted."""
    method = getattr(process, "_start_method", None) or multiprocessing.get_start_method()
    return method == "fork"


def _line(count: int, forked: bool, site: str) -> str:
    several = count != 1
    workers = f"{count} worker process{'es' * several}"
    if forked:
        return (
            f"not reported: what {workers} train{'s' * (not several)}, forked at {site}: models that were converted "
            "before run converted there, others as written"
        )
    return (
        f"left as written: what {workers} train{'s' * (not several)}, started at {site}; in them: "
        "amp_graph.convert(model)"
    )
