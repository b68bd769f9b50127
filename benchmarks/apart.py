"""Variants that take turns as in one process, each in a process of its own: with a heap that no other one has shaped.

Before: what one variant frees, or keeps, is memory that the next one need not get from the system. After: each has what
it would have if it ran alone, as it does where it is used; the turns and the ratios are those of ``interleaved``.
"""

import contextlib
import multiprocessing
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import torch
from devices import prepare
from measuring import LEAST, Job, once, warm_up
from result_file import Results
from variants import Variant

from amp_graph.errors import AmpGraphError


@dataclass
class Apart:
    """Starts variants in processes of their own, and is the clock of what they do: ``process`` sets each of them up."""

    process: Mapping[str, Any]
    threads: int
    seconds: float = 0.0
    started: list[tuple[BaseProcess, Connection]] = field(default_factory=list)

    def clock(self) -> float:
        """Return the seconds that all calls have taken, each by the clock of its process."""
        return self.seconds

    def once(self, job: Job, variant: Variant) -> tuple[Callable[[], None], Results]:
        """Return what makes one call of a variant, and what is measured once.

        Raises RuntimeError with what the variant raised.
        """
        spawn = multiprocessing.get_context("spawn")  # a fork of a process with OpenMP's threads would wait for them
        here, there = spawn.Pipe()
        own = (there, job, variant, dict(self.process), self.threads, torch._inductor.config.force_disable_caches)
        worker = spawn.Process(target=_serve, args=own, daemon=True)
        worker.start()
        there.close()  # so that reading ends with the process
        self.started.append((worker, here))
        rows = _heard(here)

        def run() -> None:
            here.send(None)
            self.seconds += _heard(here)

        return run, rows

    def close(self) -> None:
        """End the processes."""
        for worker, pipe in self.started:
            pipe.close()
            worker.join()
        self.started.clear()


@contextlib.contextmanager
def apart(process: Mapping[str, Any], threads: int) -> Iterator[Apart]:
    """Give processes for the variants of one model."""
    made = Apart(process, threads)
    try:
        yield made
    finally:
        made.close()


def _heard(pipe: Connection) -> Any:
    try:
        found = pipe.recv()
    except EOFError:
        raise RuntimeError("its process ended") from None
    if isinstance(found, str):
        raise RuntimeError(found)
    return found


def _serve(
    pipe: Connection, job: Job, variant: Variant, process: dict[str, Any], threads: int, disable_caches: bool
) -> None:
    """Run in the process of a variant: make a call whenever asked, and say what it took, until nobody asks any more."""
    import torch._inductor.config as inductor

    device = prepare(**process)
    torch.set_num_threads(threads)
    warnings.filterwarnings("ignore", "dynamo_pgo force disabled by")
    with inductor.patch(force_disable_caches=disable_caches):
        warm_up(device.name, variant.compiled)
        try:
            run, rows = once(job, variant, device)
        except (RuntimeError, AmpGraphError) as error:
            pipe.send(f"{type(error).__name__}: {error}")
            return
        pipe.send(rows)
        repeats = 1
        with contextlib.suppress(EOFError):
            while True:
                pipe.recv()
                start = device.clock()
                for _ in range(repeats):
                    run()
                seconds = device.clock() - start
                pipe.send(seconds / repeats)
                repeats = max(1, int(LEAST * repeats / seconds))
