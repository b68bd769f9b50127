"""Writes a file that a user named, as a whole or not at all, and says clearly where that is impossible.

Before: ``PermissionError``, ``ValueError: embedded null byte`` or a ``TypeError`` from inside. After: one
``AmpGraphError``, which an ``except OSError`` catches as well.
"""

from __future__ import annotations

import os
import stat
import uuid
from pathlib import Path
from typing import Any

from amp_graph.lists.errors import AmpGraphError, Undo, shortened


class FileError(AmpGraphError, OSError):
    """A file that cannot be written; ``errno`` and ``strerror`` are the system's, if it refused."""

    def __str__(self) -> str:
        """Return the whole message; that of an OSError would be the system's alone."""
        return str(self.args[0])


def write_atomically(path: str | os.PathLike[str], content: str | bytes) -> None:
    """Replace the file ``path`` by ``content``, UTF-8 text. On failure: OSError, and the old file is unchanged.

    Follows links, and keeps the mode of an old file. A device or a pipe (``/dev/stdout``) is written to directly.
    """
    data = content.encode("utf-8") if isinstance(content, str) else content
    target = Path(os.path.realpath(path))
    mode = target.stat().st_mode if target.exists() else None
    if mode is not None and not stat.S_ISREG(mode):  # a directory raises here
        target.write_bytes(data)
        return
    part = target.with_name(f".{target.name[:100]}.{uuid.uuid4().hex}.part")
    with Undo(lambda: part.unlink(missing_ok=True)):
        with open(part, "xb") as out:
            out.write(data)
            out.flush()
            os.fsync(out.fileno())
        if mode is not None:
            os.chmod(part, stat.S_IMODE(mode))
        os.replace(part, target)


def write_or_refuse(path: Any, content: str | bytes, who: str, fix: str, kind: type[AmpGraphError] = FileError) -> None:
    """Write ``content`` to ``path``; on failure raise ``kind``. ``who``: in its message; ``fix``: code that works."""
    try:
        write_atomically(os.fsdecode(path), content)
    except (OSError, ValueError, TypeError) as error:  # ValueError: a NUL in the name; TypeError: not a path
        shown = str(path) if isinstance(path, (str, os.PathLike)) and str(path).isprintable() else shortened(path)
        refusal = kind(
            f"{who}: cannot write {shown}: {getattr(error, 'strerror', None) or error}\n"
            f"  legal: a file in a directory that exists and can be written\n  fix:   {fix}"
        )
        if isinstance(refusal, OSError) and isinstance(error, OSError):
            refusal.errno, refusal.strerror = error.errno, error.strerror
        raise refusal from error


def why_unwritable(path: str | os.PathLike[str]) -> str:
    """Return why a file cannot be written, before there is something to write; "" if it can."""
    folder = os.path.dirname(os.path.abspath(path))
    if os.path.isdir(path):
        return "it is a directory"
    if not os.path.isdir(folder):
        return f"there is no directory {folder}"
    return "" if os.access(path if os.path.exists(path) else folder, os.W_OK) else "it is not writable"
