"""Runs a function in a fork with limits of time and memory, and reads the rows that it tells; a death is a cause.

The fork has what its parent imported and warmed up: a third of the time of a trial, in a process of its own.
"""

import faulthandler
import json
import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

MEMORY = 8 << 30  # bytes of data
SECONDS = 180  # of the processor
PATIENCE = 8  # times that, by the clock
Tell = Callable[[dict[str, Any]], None]


def rows_of(run: Callable[[Tell], None], seconds: int = SECONDS, memory: int = MEMORY) -> list[dict[str, Any]]:
    """Return the rows that ``run`` told in a fork; a last one, ``died``, where it did not come to its end."""
    reader, writer = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child == 0:
        os.close(reader)
        _be_child(run, writer, seconds, memory)
    os.close(writer)
    text, timed_out = _read(reader, child, seconds * PATIENCE)
    _, status = os.waitpid(child, 0)
    rows = [json.loads(line) for line in text.splitlines()]
    died = _death(status, seconds, timed_out)
    return [*rows, {"died": died}] if died else rows


def _be_child(run: Callable[[Tell], None], writer: int, seconds: int, memory: int) -> None:
    code = 1
    try:
        resource.setrlimit(resource.RLIMIT_DATA, (memory, memory))
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 5))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        faulthandler.disable()  # a death is told once, by the parent
        quiet = os.open(os.devnull, os.O_WRONLY)
        os.dup2(quiet, 1)
        os.dup2(quiet, 2)
        run(lambda row: _write(writer, (json.dumps(row) + "\n").encode()))
        code = 0
    except BaseException as error:  # the parent's code must not go on here
        _write(writer, (json.dumps({"died": f"{type(error).__name__}: {error}"[:300]}) + "\n").encode())
        code = 0
    finally:
        os._exit(code)


def _write(writer: int, data: bytes) -> None:
    while data:
        data = data[os.write(writer, data) :]


def _read(reader: int, child: int, seconds: float) -> tuple[str, bool]:
    """Read until the child closes its end, or kill it at the limit."""
    os.set_blocking(reader, False)
    end, held, timed_out = time.monotonic() + seconds, b"", False
    while True:
        try:
            found = os.read(reader, 1 << 16)
            if not found:
                break
            held += found
        except BlockingIOError:
            if time.monotonic() > end and not timed_out:
                os.kill(child, signal.SIGKILL)
                timed_out = True
            time.sleep(0.1)
    os.close(reader)
    return held.decode(), timed_out


def _death(status: int, seconds: float, timed_out: bool) -> str:
    if timed_out:
        return f"it took longer than {seconds * PATIENCE:.0f} s"
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        too_long = number == signal.SIGXCPU
        return f"it took longer than {seconds} s" if too_long else f"killed by {signal.Signals(number).name}"
    return "" if os.WEXITSTATUS(status) == 0 else f"exit status {os.WEXITSTATUS(status)}"
