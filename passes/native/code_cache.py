"""The cache directory of compiled code: ownership checks, verification before a library is loaded, and installation.

A library's name holds a hash of its inputs and one of its content; a record beside it, written last, names the complete
library. Before: ``kernel-5d0f...``, a key.
After: ``kernel-5d0f....8c12....so``, verified, or None.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import stat
import time
from pathlib import Path

from amp_graph.passes.native.atomic_files import replace_file, sync_folder
from amp_graph.passes.native.run_compiler import SECONDS, refusal

FOLDER = "AMP_GRAPH_CACHE"  # the environment variable for the cache directory
FIX = f"{FOLDER}=/a/folder/of/your/own"
_PART = re.compile(r"\.?[\w+-]+-[0-9a-f]{24}(\.sha256)?\.[0-9a-f]{32}\.part")
_RECORD = re.compile(r"[0-9a-f]{64}\n?")


def folder() -> Path:
    """Return the cache directory: ``AMP_GRAPH_CACHE``, or a directory in the user's cache."""
    given = os.environ.get(FOLDER)
    base = os.environ.get("XDG_CACHE_HOME", "")
    kept = Path(given) if given else Path(base if os.path.isabs(base) else Path.home() / ".cache") / "amp_graph"
    return kept.absolute()  # the loader would search elsewhere for a relative name


def make_folder(kept: Path) -> None:
    """Make ``kept``, accessible to this user only, and its parents; refuse one that belongs to another user."""
    for missing in reversed([path for path in (kept, *kept.parents) if not path.exists()]):
        missing.mkdir(mode=0o700, exist_ok=True)
    if not is_there(kept):
        raise NotADirectoryError(f"{kept} is not a directory")
    if not os.access(kept, os.W_OK | os.X_OK):
        raise PermissionError(f"{kept} is not writable")


def is_there(kept: Path) -> bool:
    """Say whether the directory exists. Raises CompilerError if others could have put code into it."""
    try:
        found = kept.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    if not stat.S_ISDIR(found.st_mode):
        return False
    if told := _distrust(found):
        raise refusal(f"the directory {kept} {told}: its code is not loaded", f"chmod go-w {kept}, or {FIX}")
    return True


def _distrust(found: os.stat_result) -> str:
    """Return why another user may have written ``found``; empty if only this user or root can have."""
    if not hasattr(os, "getuid"):
        return ""
    if found.st_uid not in (os.geteuid(), 0):
        return f"belongs to another user ({found.st_uid})"
    return "may be written to by others" if found.st_mode & 0o022 else ""


def verified(kept: Path, key: str) -> Path | None:
    """Return the library of ``key`` whose content matches its record; None if there is none to trust."""
    if not is_there(kept):
        return None
    record = _own_bytes(kept / f"{key}.sha256", 1024)
    if record is None or not _RECORD.fullmatch(text := record.decode("ascii", "replace")):
        return None
    library = kept / _name(key, text.strip())
    content = _own_bytes(library)
    return library if content is not None and _digest(content) == text.strip() else None


def part_of(kept: Path, key: str, unique: str) -> Path:
    """Return the temporary path to which a process writes the library of ``key``."""
    return kept / f"{key}.{unique}.part"


def put(part: Path, key: str) -> None:
    """Move ``part``, the complete library of ``key``, to the name that later processes find. Raises OSError."""
    mode = stat.S_IMODE(part.stat().st_mode) & 0o755  # whatever the umask, nobody else can write to it
    os.chmod(part, mode)
    with open(part, "r+b") as opened:
        digest = _digest(opened.read())
        os.fsync(opened.fileno())
    os.replace(part, part.with_name(_name(key, digest)))
    sync_folder(part.parent)
    replace_file(part.with_name(f"{key}.sha256"), f"{digest}\n".encode(), mode & 0o644)


def forget(library: Path, key: str) -> None:
    """Remove ``library``, which could not be used, so that it is compiled again."""
    for path in (library.with_name(f"{key}.sha256"), library):
        with contextlib.suppress(OSError):
            path.unlink()


def forget_parts(kept: Path) -> None:
    """Remove partial files of this user's processes that ended during a compilation; nothing else."""
    for part in kept.glob("*.part"):
        with contextlib.suppress(OSError):  # another process removes it
            found = part.lstat()
            own = stat.S_ISREG(found.st_mode) and not _distrust(found) and _PART.fullmatch(part.name)
            if own and time.time() - found.st_mtime > 2 * SECONDS:
                part.unlink()


def is_whole(library: Path) -> bool:
    """Say whether an ELF file is as long as its headers say: loading a truncated one crashes the process."""
    content = library.read_bytes()
    if content[:4] != b"\x7fELF":
        return bool(content)  # for another system; the loader refuses what it does not know
    if len(content) < 64:
        return False
    if content[4:6] != b"\x02\x01":  # not 64-bit, or big-endian
        return True
    at, size, count = (int.from_bytes(content[i : i + n], "little") for i, n in ((40, 8), (58, 2), (60, 2)))
    start, entry, number = (int.from_bytes(content[i : i + n], "little") for i, n in ((32, 8), (54, 2), (56, 2)))
    if max(at + size * count, start + entry * number) > len(content) or entry < 56:
        return False
    for place in range(start, start + entry * number, entry):
        offset, length = (int.from_bytes(content[place + i : place + i + 8], "little") for i in (8, 32))
        if offset + length > len(content):
            return False
    return True


def _name(key: str, digest: str) -> str:
    return f"{key}.{digest[:16]}.so"


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _own_bytes(path: Path, most: int = -1) -> bytes | None:
    """Return the content of a regular file that only this user or root can have written; else None."""
    try:
        with open(path, "rb", opener=_without_waiting) as opened:
            found = os.fstat(opened.fileno())
            return opened.read(most) if stat.S_ISREG(found.st_mode) and not _distrust(found) else None
    except OSError:
        return None


def _without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))  # opening a pipe would wait for a writer
