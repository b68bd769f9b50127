"""The folder of compiled code: whose it must be, what is looked at before a library is loaded, and how one gets there.

A library is named by what it was compiled from and by its content; a record beside it, written last, names the one that
is whole. Before: ``kernel-5d0f...``, a key. After: ``kernel-5d0f....8c12....so``, verified, or None.
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

FOLDER = "AMP_GRAPH_CACHE"  # the variable that says where to keep what was compiled
FIX = f"{FOLDER}=/a/folder/of/your/own"
_PART = re.compile(r"\.?[\w+-]+-[0-9a-f]{24}(\.sha256)?\.[0-9a-f]{32}\.part")
_RECORD = re.compile(r"[0-9a-f]{64}\n?")


def folder() -> Path:
    """Return where compiled code is kept: ``AMP_GRAPH_CACHE``, or a folder of the user's cache."""
    given = os.environ.get(FOLDER)
    base = os.environ.get("XDG_CACHE_HOME", "")
    kept = Path(given) if given else Path(base if os.path.isabs(base) else Path.home() / ".cache") / "amp_graph"
    return kept.absolute()  # of a relative name the loader would look elsewhere


def make_folder(kept: Path) -> None:
    """Make ``kept``, for this user alone, and what is above it; refuse one that is another user's."""
    for missing in reversed([path for path in (kept, *kept.parents) if not path.exists()]):
        missing.mkdir(mode=0o700, exist_ok=True)
    if not is_there(kept):
        raise NotADirectoryError(f"{kept} is no folder")
    if not os.access(kept, os.W_OK | os.X_OK):
        raise PermissionError(f"{kept} cannot be written to")


def is_there(kept: Path) -> bool:
    """Say whether there is the folder. Raises CompilerError where others could have put code into it."""
    try:
        found = kept.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    if not stat.S_ISDIR(found.st_mode):
        return False
    if told := _distrust(found):
        raise refusal(f"the folder {kept} {told}: what it holds is not run", f"chmod go-w {kept}, or {FIX}")
    return True


def _distrust(found: os.stat_result) -> str:
    """Return why another user may have written what is ``found``; empty where only this one, or root, can have."""
    if not hasattr(os, "getuid"):
        return ""
    if found.st_uid not in (os.geteuid(), 0):
        return f"belongs to another user ({found.st_uid})"
    return "may be written to by others" if found.st_mode & 0o022 else ""


def verified(kept: Path, key: str) -> Path | None:
    """Return the library of ``key`` whose content is what its record says; None where there is none to trust."""
    if not is_there(kept):
        return None
    record = _own_bytes(kept / f"{key}.sha256", 1024)
    if record is None or not _RECORD.fullmatch(text := record.decode("ascii", "replace")):
        return None
    library = kept / _name(key, text.strip())
    content = _own_bytes(library)
    return library if content is not None and _digest(content) == text.strip() else None


def part_of(kept: Path, key: str, unique: str) -> Path:
    """Return where a process writes the library of ``key`` before it is whole."""
    return kept / f"{key}.{unique}.part"


def put(part: Path, key: str) -> None:
    """Give ``part``, a whole library of ``key``, the name that later processes find. Raises OSError."""
    mode = stat.S_IMODE(part.stat().st_mode) & 0o755  # whatever the umask, nobody else writes to it
    os.chmod(part, mode)
    with open(part, "r+b") as opened:
        digest = _digest(opened.read())
        os.fsync(opened.fileno())
    os.replace(part, part.with_name(_name(key, digest)))
    sync_folder(part.parent)
    replace_file(part.with_name(f"{key}.sha256"), f"{digest}\n".encode(), mode & 0o644)


def forget(library: Path, key: str) -> None:
    """Have ``library``, which could not be used, made anew."""
    for path in (library.with_name(f"{key}.sha256"), library):
        with contextlib.suppress(OSError):
            path.unlink()


def forget_parts(kept: Path) -> None:
    """Remove what a process of this user left that ended while it compiled; nothing but that."""
    for part in kept.glob("*.part"):
        with contextlib.suppress(OSError):  # another process removes it
            found = part.lstat()
            own = stat.S_ISREG(found.st_mode) and not _distrust(found) and _PART.fullmatch(part.name)
            if own and time.time() - found.st_mtime > 2 * SECONDS:
                part.unlink()


def is_whole(library: Path) -> bool:
    """Say whether an ELF file reaches as far as its headers say: to load one that does not ends the process."""
    content = library.read_bytes()
    if content[:4] != b"\x7fELF":
        return bool(content)  # of another system, whose loader refuses what it does not know
    if len(content) < 64:
        return False
    if content[4:6] != b"\x02\x01":  # not of 64 bits, or with the highest byte first
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
    """Return what is in a plain file that only this user, or root, can have written; else None."""
    try:
        with open(path, "rb", opener=_without_waiting) as opened:
            found = os.fstat(opened.fileno())
            return opened.read(most) if stat.S_ISREG(found.st_mode) and not _distrust(found) else None
    except OSError:
        return None


def _without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))  # a pipe would wait for who writes
