"""C that is compiled once on the machine that it runs on, for its instructions, and kept in a folder.

Before: a file ``update_kernel.c`` and macros. After: ``load(source, ("-DRULE=ADAM",))``, a ``ctypes.CDLL``.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import threading
import time
import uuid
from collections import defaultdict
from functools import lru_cache
from pathlib import Path

import torch

from amp_graph.lists import AmpGraphError

HEADER = Path(__file__).with_name("kernel.h")  # which, like those beside it, any of the sources may include
FOLDER = "AMP_GRAPH_CACHE"  # the variable that says where to keep what was compiled
LEAST_OF_A_THREAD = 1 << 17  # elements: to start a thread takes as long as some 50,000 of them
SECONDS = 120  # that a compiler may take; it needs half a second
# No product fused with a sum that the source does not fuse.
FLAGS = ("-O3", "-std=gnu11", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off")
# What C calls the low precision that it is compiled for.
MACROS: dict[torch.dtype, tuple[str, ...]] = {torch.bfloat16: (), torch.float16: ("-DLOW_FP16",)}
# Of a source whose backward is a library of its own, which inference need not wait for.
PARTS: dict[bool, tuple[str, ...]] = {False: (), True: ("-DBACKWARD",)}
# What torch itself asks of a CPU before it calls it by these names; more would not run on another machine of the name.
INSTRUCTIONS = {
    "AVX2": ("-mavx2", "-mfma", "-mf16c"),
    "AVX512": ("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx2", "-mfma", "-mf16c"),
}
# Two threads do not compile the same: one waits for what the other makes. A child of a fork has no other thread.
_locks: defaultdict[tuple[Path, tuple[str, ...]], threading.Lock] = defaultdict(threading.Lock)
# What torch's OpenMP is asked for, by these names whether it is GNU's or another that stands in for it.
OPENMP = ("GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads")
_on_openmp: list[ctypes.CDLL] = []
_is_forked = False
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_locks.clear)
    os.register_at_fork(after_in_child=lambda: _leave_openmp())


class CompilerError(AmpGraphError):
    """C code that could not be compiled, or not be loaded, on this machine."""


@lru_cache
def load(source: Path, macros: tuple[str, ...] = ()) -> ctypes.CDLL:
    """Compile ``source``, a C file, with ``macros`` ("-DNAME=VALUE"), unless that was done before.

    Raises CompilerError where there is no compiler, the compiler refuses, or nothing can be written.
    """
    with _locks[source, macros]:
        return _loaded(source, macros)


def load_if_possible(source: Path, macros: tuple[str, ...] = ()) -> ctypes.CDLL | None:
    """``load``, or None where there is no compiler, it refuses, or nothing can be written."""
    try:
        return load(source, macros)
    except CompilerError:
        return None


def _loaded(source: Path, macros: tuple[str, ...]) -> ctypes.CDLL:
    options = (*FLAGS, *INSTRUCTIONS.get(torch.backends.cpu.get_cpu_capability(), ()), *macros)
    headers = [header.read_text() for header in sorted(HEADER.parent.glob("*.h"))]
    told = "\n".join((source.read_text(), *headers, *options, platform.machine(), *platform.libc_ver()))
    try:
        made = folder() / f"{source.stem}-{hashlib.sha256(told.encode()).hexdigest()[:24]}.so"
        if not made.is_file():
            _compile(source, options, made)
        return _sharing_threads(ctypes.CDLL(str(made)))
    except (OSError, RuntimeError) as error:  # RuntimeError: a user without a home
        raise _refusal(str(error), f"{FOLDER}=/a/folder/to/write/to") from error


def _sharing_threads(found: ctypes.CDLL) -> ctypes.CDLL:
    """Return ``found``, which runs on the threads of torch's OpenMP from now on; on its own where there is none."""
    if hasattr(found, "use_openmp") and has_openmp():
        functions = [ctypes.cast(f, ctypes.c_void_p).value for f in map(of_c_library, OPENMP) if f is not None]
        found.use_openmp((ctypes.c_void_p * len(OPENMP))(*functions))
        _on_openmp.append(found)
    return found


def has_openmp() -> bool:
    """Say whether compiled code runs on the threads of torch's OpenMP: not in the child of a fork."""
    return not _is_forked and _openmp_is_there()


@lru_cache  # asked amid a step
def _openmp_is_there() -> bool:
    return None not in map(of_c_library, OPENMP)


def _leave_openmp() -> None:
    """Run on threads of our own: those of OpenMP were left behind by a fork, and it would wait for them."""
    global _is_forked
    _is_forked = True
    for found in _on_openmp:
        found.use_openmp((ctypes.c_void_p * len(OPENMP))())
    _on_openmp.clear()


def of_c_library(name: str) -> ctypes._NamedFuncPointer | None:
    """Return the function ``name`` of the C library that this process runs on; None where it has none."""
    try:
        found: ctypes._NamedFuncPointer = getattr(ctypes.CDLL(None), name)
    except (AttributeError, OSError, TypeError):  # TypeError: Windows takes no None
        return None
    return found


def threads_for(elements: int) -> int:
    """Return how many of torch's threads compiled code may start for so many elements."""
    return max(1, min(torch.get_num_threads(), elements // LEAST_OF_A_THREAD))


def threads_at_once(elements: int) -> int:
    """``threads_for``, of threads that are there: 1 where each would have to be started, as after a fork."""
    return threads_for(elements) if _on_openmp else 1


def folder() -> Path:
    """Return where compiled code is kept: ``AMP_GRAPH_CACHE``, or a folder of the user's cache."""
    given = os.environ.get(FOLDER)
    return Path(given or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "amp_graph")


def _compile(source: Path, options: tuple[str, ...], made: Path) -> None:
    """Write ``made`` as a whole: another process may be about to load it."""
    made.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    _forget_parts(made.parent)
    part = made.with_name(f"{made.stem}.{uuid.uuid4().hex}.part")
    command = [*_compiler(), *options, "-shared", "-fPIC", "-pthread", f"-I{HEADER.parent}"]
    command += [str(source), "-o", str(part), "-lm"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
        if done.returncode:
            raise _refusal(f"{shlex.join(command)}\n{done.stderr.strip()[:2000]}", "another compiler: CC=gcc")
        os.replace(part, made)
    except subprocess.TimeoutExpired as error:
        raise _refusal(f"{command[0]} took more than {SECONDS} seconds", "another compiler: CC=gcc") from error
    finally:
        part.unlink(missing_ok=True)


def _forget_parts(inside: Path) -> None:
    """Remove what a process left that ended while it compiled."""
    for part in inside.glob("*.part"):
        with contextlib.suppress(OSError):  # another process removes it
            if time.time() - part.stat().st_mtime > SECONDS:
                part.unlink()


def _compiler() -> list[str]:
    """Return the C compiler's command: ``CC``, or the first of the usual ones that is there."""
    given = shlex.split(os.environ.get("CC", ""))
    for command in [given] if given else [["cc"], ["gcc"], ["clang"]]:
        if shutil.which(command[0]):
            return command
    raise _refusal(f"no C compiler: {given[0] if given else 'cc, gcc and clang'} not found", "install one, or set CC")


def _refusal(what: str, fix: str) -> CompilerError:
    return CompilerError(
        f"compiling for this CPU: {what}\n  legal: a C compiler that makes shared libraries\n"
        f"  fix:   {fix}; or TrainStep(..., update='torch')"
    )
