"""Counts the processes that a script starts by ``multiprocessing``: models in them run as written.

``Workers().lines()``: "left as written: 2 worker processes (train, started at main.py:30)".
"""

from __future__ import annotations

import functools
import multiprocessing.process
from collections import Counter
from typing import Any

from amp_graph.run.call_site import site_of_call

LOADERS = "torch.utils.data"  # they load data, and train nothing


class Workers:
    """The processes that were started from now on."""

    def __init__(self) -> None:
        """Count the processes from now on."""
        self.found: Counter[str] = Counter()
        plain = multiprocessing.process.BaseProcess.start

        @functools.wraps(plain)
        def start(process: Any) -> None:
            target = getattr(process, "_target", None)
            if not getattr(target, "__module__", "").startswith(LOADERS):
                self.found[f"started at {site_of_call()}"] += 1
            plain(process)

        multiprocessing.process.BaseProcess.start = start  # type: ignore[assignment, method-assign]

    def lines(self) -> list[str]:
        """Return a line for each place that started processes."""
        return [
            f"left as written: what {count} worker process{'es' * (count != 1)} train, {where}; "
            "in them: amp_graph.convert(model)"
            for where, count in self.found.items()
        ]
