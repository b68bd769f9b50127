"""The directory of compiled code, and the C compiler that fills it.

A library's name holds a hash of what it was compiled from, and one of its content, by which it is verified before it
is loaded. Before: ``kernel-5d0f...``, a key. After: ``kernel-5d0f....8c12....so``, verified, or None.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from amp_graph.lists import AmpGraphError

FOLDER = "AMP_GRAPH_CACHE"  # the environment variable for the cache directory
FIX = f"{FOLDER}=/a/folder/of/your/own"
SECONDS = 60  # that a compilation may take; it needs half a second
QUOTED = 2000  # bytes of compiler output


class CompilerError(AmpGraphError):
    """C code could not be compiled or loaded on this machine."""


def refusal(what: str, fix: str = "another compiler: CC=gcc") -> CompilerError:
    """Return the error that says ``what`` went wrong."""
    return CompilerError(
        f"compiling for this CPU: {what}\n  legal: a C compiler that makes shared libraries\n  fix:   {fix}"
    )


def folder() -> Path:
    """Return the cache directory: ``AMP_GRAPH_CACHE``, or a directory in the user's cache."""
    given = os.environ.get(FOLDER)
    base = os.environ.get("XDG_CACHE_HOME", "")
    kept = Path(given) if given else Path(base if os.path.isabs(base) else Path.home() / ".cache") / "amp_graph"
    return kept.absolute()  # the loader would search elsewhere for a relative name


def is_there(kept: Path) -> bool:
    """Say whether the directory exists. Raises CompilerError if others could have put code into it."""
    if not kept.is_dir():
        return False
    if wrong := _who_else_writes(kept):
        raise refusal(f"the directory {kept} {wrong}: its code is not loaded", f"chmod go-w {kept}, or {FIX}")
    return True


def _who_else_writes(path: Path) -> str:
    """Return what lets others than this user and root write to ``path``; "" if nothing does."""
    found = path.stat()
    if os.name != "posix":
        return ""
    if found.st_mode & 0o022:
        return "may be written to by others"
    return "" if found.st_uid in (os.geteuid(), 0) else f"belongs to another user ({found.st_uid})"


def verified(kept: Path, key: str) -> Path | None:
    """Return a library of ``key`` whose content is that of its name, and which only its user can write to; or None."""
    found = kept.glob(f"{key}.*.so") if is_there(kept) else ()
    own = (one for one in found if one.is_file() and not _who_else_writes(one))
    return next((one for one in own if one.name == _name(key, one.read_bytes())), None)


def put(part: Path, key: str) -> None:
    """Move ``part``, the complete library of ``key``, to the name that later processes find. Raises OSError."""
    os.chmod(part, 0o755)  # whatever the umask, nobody else can write to it
    with open(part, "r+b") as opened:
        content = opened.read()
        os.fsync(opened.fileno())
    os.replace(part, part.with_name(_name(key, content)))


def _name(key: str, content: bytes) -> str:
    return f"{key}.{hashlib.sha256(content).hexdigest()[:32]}.so"


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


def run_compiler(arguments: Sequence[str]) -> None:
    """Run the C compiler with ``arguments``. Raises CompilerError if it fails, or takes longer than ``SECONDS``."""
    whole = [*compiler(), *arguments]
    with tempfile.TemporaryFile() as printed:  # not a pipe, which what a killed compiler started would keep open
        try:
            nothing = subprocess.DEVNULL
            status = subprocess.run(whole, stdin=nothing, stdout=nothing, stderr=printed, timeout=SECONDS).returncode
        except subprocess.TimeoutExpired as error:
            raise refusal(f"{whole[0]} took more than {SECONDS} seconds") from error
        except OSError as error:
            raise refusal(f"{whole[0]} cannot be run: {error}") from error
        printed.seek(0)
        text = printed.read(QUOTED).decode("utf-8", "replace").strip()
    if status:
        raise refusal(f"{shlex.join(whole)}\n{text or f'exit status {status}, and no output'}")
