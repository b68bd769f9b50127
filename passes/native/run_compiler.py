"""Runs the C compiler with limits on time, output and repeated failures.

Before: ``cc -shared kernel.c -o kernel.so`` as words.
After: the file, or a CompilerError that says what went wrong.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import threading
from collections.abc import Sequence
from typing import IO

from amp_graph.lists import AmpGraphError
from amp_graph.lists.errors import Undo

SECONDS = 60  # seconds that a compilation may take; it needs half a second
QUOTED = 2000  # bytes of compiler output
_OTHER = "another compiler: CC=gcc"
_unusable: dict[tuple[str, ...], str] = {}  # compilers that hung or could not be started, and how


class CompilerError(AmpGraphError):
    """C code could not be compiled or loaded on this machine."""


def refusal(what: str, fix: str = _OTHER) -> CompilerError:
    """Return the error that says ``what`` went wrong."""
    return CompilerError(
        f"compiling for this CPU: {what}\n  legal: a C compiler that makes shared libraries\n"
        f"  fix:   {fix}; or TrainStep(..., update='torch')"
    )


def compiler_words() -> tuple[str, ...]:
    """Return the words of the variable CC: a compiler and the user's options."""
    try:
        return tuple(shlex.split(os.environ.get("CC", "")))
    except ValueError as error:
        raise refusal(f"CC={os.environ['CC']!r}: {error}", "CC=gcc") from error


def compiler() -> tuple[str, ...]:
    """Return the C compiler's command: ``CC``, or the first of the usual ones that is installed."""
    given = compiler_words()
    for command in [given] if given else [("cc",), ("gcc",), ("clang",)]:
        if shutil.which(command[0]):
            return command
    raise refusal(f"no C compiler: {given[0] if given else 'cc, gcc and clang'} not found", "install one, or set CC")


def run_compiler(command: tuple[str, ...], arguments: Sequence[str]) -> None:
    """Run ``command`` with ``arguments``; this process does not retry one that hung or could not be started."""
    if command in _unusable:
        raise refusal(_unusable[command])
    whole = [*command, *arguments]
    try:
        status, printed = _ran(whole)
    except subprocess.TimeoutExpired as error:
        _unusable[command] = f"{command[0]} took more than {SECONDS} seconds; this process does not run it again"
        raise refusal(_unusable[command]) from error
    except OSError as error:
        _unusable[command] = f"{command[0]} cannot be run: {error}"
        raise refusal(_unusable[command]) from error
    if status:
        raise refusal(f"{shlex.join(whole)}\n{printed or f'exit status {status}, and no output'}")


def _ran(whole: list[str]) -> tuple[int, str]:
    """Return the exit status and the beginning of the output; terminate all child processes with it."""
    process = subprocess.Popen(
        whole, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True
    )
    assert process.stderr is not None, "asked for"
    said = bytearray()
    reader = threading.Thread(target=_read, args=(process.stderr, said), name="amp_graph reads", daemon=True)
    reader.start()
    with Undo(lambda: _end(process)):  # of KeyboardInterrupt, too, which a separate session does not receive
        status = process.wait(SECONDS)
    reader.join(1)  # longer only if a child process lives on
    return status, bytes(said).decode("utf-8", "replace").strip()


def _read(pipe: IO[bytes], said: bytearray) -> None:
    """Read to the end, so that the writer does not block, and keep the beginning."""
    with pipe, contextlib.suppress(OSError, ValueError):
        while read := pipe.read1(1 << 16):  # type: ignore[attr-defined]
            said += read[: QUOTED - len(said)]


def _end(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(OSError):
        if hasattr(os, "killpg"):
            os.killpg(process.pid, signal.SIGKILL)
    process.kill()
    process.wait()
