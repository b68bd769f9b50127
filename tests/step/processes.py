"""Processes of this machine as the ranks of a group, on gloo."""

import contextlib
import datetime
import gc
import os
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


@contextlib.contextmanager
def group_of(rank: int, size: int, port: int, timeout: int = 120) -> Iterator[None]:
    """Be one rank of a group."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(size))
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", timeout=datetime.timedelta(seconds=timeout))
    try:
        yield
    finally:
        # DDP's reducer must be gone by now: as the group's last owner it waits for the group's threads and keeps the
        # GIL, and one that has just ended a reduction waits for the GIL, to let go of a tensor.
        gc.collect()
        torch.distributed.destroy_process_group()


def _as_rank(function: Callable[..., None], rank: int, size: int, port: int, *args: Any, timeout: int) -> None:
    with group_of(rank, size, port, timeout):
        function(rank, size, *args)


def processes() -> Iterator[Callable[..., list[Any]]]:
    """Yield what runs a function on so many ranks, and returns what it kept on each.

    The processes are the same for all calls: importing torch, they would spend most time.
    """
    with ProcessPoolExecutor(4, mp.get_context("spawn")) as pool:

        def run(function: Callable[..., None], size: int, path: Path, *args: Any, timeout: int = 120) -> list[Any]:
            given = free_port(), str(path), *args
            started = [pool.submit(_as_rank, function, r, size, *given, timeout=timeout) for r in range(size)]
            for one in started:
                one.result()
            return [torch.load(path / str(rank)) for rank in range(size)]

        yield run
