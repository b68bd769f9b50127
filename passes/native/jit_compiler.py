"""JIT-compiles C for the host CPU and caches the library.

Before: a file ``attention_kernel.c`` and macros.
After: ``load(source, ("-DRULE=ADAM",))``, a ``ctypes.CDLL``.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import itertools
import os
import platform
import shlex
import threading
import uuid
from collections import defaultdict
from functools import lru_cache
from pathlib import Path

import torch

from amp_graph.lists.errors import first_line
from amp_graph.passes.native.code_cache import (
    FIX,
    compiler,
    compiler_words,
    folder,
    put,
    refusal,
    run_compiler,
    verified,
)
from amp_graph.passes.native.code_cache import FOLDER as FOLDER
from amp_graph.passes.native.code_cache import CompilerError as CompilerError

HEADER = Path(__file__).with_name("low_precision.h")  # which any source, here or elsewhere, may include
LEAST_OF_A_THREAD = 1 << 17  # elements per thread: starting a thread takes as long as some 50,000 of them
# No fused multiply-add that the source does not ask for.
FLAGS = ("-O3", "-std=gnu11", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off")
# The C names of the low precision that a library is compiled for.
MACROS: dict[torch.dtype, tuple[str, ...]] = {torch.bfloat16: (), torch.float16: ("-DLOW_FP16",)}
# For sources whose backward is a separate library, which inference need not wait for.
PARTS: dict[bool, tuple[str, ...]] = {False: (), True: ("-DBACKWARD",)}
# What torch itself requires of a CPU for these names; more would not run on another machine of the same name.
INSTRUCTIONS = {
    "AVX2": ("-mavx2", "-mfma", "-mf16c"),
    "AVX512": ("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx2", "-mfma", "-mf16c"),
}
# Two threads do not compile the same library: one waits for the other. A forked child has no other thread.
_locks: defaultdict[tuple[Path, tuple[str, ...]], threading.Lock] = defaultdict(threading.Lock)
# Symbols of torch's OpenMP, the same in GNU's and in compatible runtimes.
OPENMP = ("GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads")
_on_openmp: list[ctypes.CDLL] = []
# Why a source could not be compiled or loaded, with its macros and the environment's settings: one attempt is enough.
_failed: dict[tuple[Path, tuple[str, ...], tuple[str | None, ...]], str] = {}
_is_forked = False
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_locks.clear)
    os.register_at_fork(after_in_child=lambda: _leave_openmp())


@lru_cache
def load(source: Path, macros: tuple[str, ...] = ()) -> ctypes.CDLL:
    """Compile ``source``, a C file, with ``macros`` ("-DNAME=VALUE"), unless it is cached, and load it.

    Raises CompilerError if there is no compiler, if it fails, or if the directory is not trusted or not writable.
    """
    attempt = (source, macros, _settings())
    with _locks[source, macros]:
        if attempt in _failed:
            raise CompilerError(_failed[attempt])
        try:
            return _loaded(source, macros)
        except CompilerError as error:
            _failed[attempt] = str(error)
            raise


def why_refused() -> dict[str, list[str]]:
    """Return, by reason, the sources that could not be compiled or loaded with the current environment settings."""
    found: dict[str, list[str]] = {}
    for (source, _, settings), why in list(_failed.items()):
        if settings == _settings():
            found.setdefault(first_line(why), []).append(source.stem)
    return found


def _settings() -> tuple[str | None, ...]:
    return tuple(map(os.environ.get, ("CC", FOLDER, "XDG_CACHE_HOME", "HOME", "PATH")))


def load_if_possible(source: Path, macros: tuple[str, ...] = ()) -> ctypes.CDLL | None:
    """``load``, or None if there is no compiler, it fails, or nothing can be written."""
    try:
        return load(source, macros)
    except CompilerError:
        return None


def _loaded(source: Path, macros: tuple[str, ...]) -> ctypes.CDLL:
    options = (*FLAGS, *INSTRUCTIONS.get(torch.backends.cpu.get_cpu_capability(), ()), *macros)
    try:
        kept, key = folder(), _key(source, options)
        path = verified(kept, key)
        return _sharing_threads(_built(source, options, kept, key) if path is None else ctypes.CDLL(str(path)))
    except (OSError, RuntimeError, ValueError) as error:  # RuntimeError: a user without a home
        raise refusal(str(error), FIX) from error


def _key(source: Path, options: tuple[str, ...]) -> str:
    """Return the cache key of ``source``: a hash of its text, the headers, the options and the platform."""
    headers = [header.read_text() for header in sorted(HEADER.parent.glob("*.h"))]
    own = compiler_words()[1:]  # CC="gcc -march=native", say, whose code another CPU may not run
    options = (*options, *own, *(_cpu() if own else ()))
    told = "\n".join((source.read_text(), *headers, *options, platform.machine(), *platform.libc_ver()))
    return f"{source.stem}-{hashlib.sha256(told.encode()).hexdigest()[:24]}"


@lru_cache
def _cpu() -> tuple[str, ...]:
    """Return this CPU's features, as reported by the system."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as told:
            lines = [line for line in itertools.islice(told, 64) if line.startswith(("flags", "Features", "model"))]
    except OSError:
        lines = [platform.processor()]
    return tuple(dict.fromkeys(lines))


def _sharing_threads(found: ctypes.CDLL) -> ctypes.CDLL:
    """Let ``found`` run on the threads of torch's OpenMP; on its own threads if there is none. Return it."""
    if hasattr(found, "use_openmp") and has_openmp():
        functions = [ctypes.cast(f, ctypes.c_void_p).value for f in map(of_c_library, OPENMP) if f is not None]
        found.use_openmp((ctypes.c_void_p * len(OPENMP))(*functions))
        _on_openmp.append(found)
    return found


def has_openmp() -> bool:
    """Say whether compiled code runs on the threads of torch's OpenMP: not in a forked child."""
    return not _is_forked and _openmp_is_there()


@lru_cache  # called during a step
def _openmp_is_there() -> bool:
    return None not in map(of_c_library, OPENMP)


def _leave_openmp() -> None:
    """Run on our own threads: a fork leaves OpenMP's threads behind, and it would wait for them."""
    global _is_forked
    _is_forked = True
    for found in _on_openmp:
        found.use_openmp((ctypes.c_void_p * len(OPENMP))())
    _on_openmp.clear()


def of_c_library(name: str) -> ctypes._NamedFuncPointer | None:
    """Return the function ``name`` of this process's C library; None if it has none."""
    try:
        found: ctypes._NamedFuncPointer = getattr(ctypes.CDLL(None), name)
    except (AttributeError, OSError, TypeError):  # TypeError: Windows does not accept None
        return None
    return found


def threads_for(elements: int) -> int:
    """Return how many of torch's threads compiled code may use for this many elements."""
    return max(1, min(torch.get_num_threads(), elements // LEAST_OF_A_THREAD))


def threads_at_once(elements: int) -> int:
    """``threads_for``, counting only running threads: 1 where each would have to be started, as after a fork."""
    return threads_for(elements) if _on_openmp else 1


def _built(source: Path, options: tuple[str, ...], kept: Path, key: str) -> ctypes.CDLL:
    """Compile ``source`` and load it; cache the library in the directory ``kept`` for later processes."""
    kept.parent.mkdir(parents=True, exist_ok=True)
    kept.mkdir(mode=0o700, exist_ok=True)
    part = kept / f"{key}.{uuid.uuid4().hex}.part"
    part.touch(mode=0o700)  # raises in a directory that is not writable
    try:
        arguments = [*options, "-shared", "-fPIC", "-pthread", f"-I{HEADER.parent}"]
        run_compiler([*arguments, str(source), "-o", str(part), "-lm"])
        try:
            found = ctypes.CDLL(str(part))
        except OSError as error:
            raise refusal(f"{shlex.join(compiler())} did not produce a valid library of {source.name}") from error
        with contextlib.suppress(OSError):  # a full disk: this process runs it, and the next one compiles again
            put(part, key)
        return found
    finally:
        part.unlink(missing_ok=True)
