"""Write a file atomically: first to a temporary name beside it, synced to disk, then renamed.

Before: ``path.write_text(text)``, which a full disk truncates.
After: ``write_atomically(path, text)``.
"""

from __future__ import annotations

import contextlib
import os
import stat
import uuid
from pathlib import Path

from amp_graph.lists.errors import Undo


def write_atomically(path: str | os.PathLike[str], content: str | bytes) -> None:
    """Replace the file ``path`` by ``content``, UTF-8 text. On failure: OSError, and the old file is unchanged.

    Follows links, and keeps the mode of an old file. A device or a pipe (``/dev/stdout``) is written to directly.
    """
    data = content.encode("utf-8") if isinstance(content, str) else content
    target = Path(os.path.realpath(path))
    mode = _mode_of(target)
    if mode is not None and not stat.S_ISREG(mode):  # a directory raises here
        target.write_bytes(data)
        return
    replace_file(target, data, mode)


def replace_file(target: Path, data: bytes, mode: int | None = None) -> None:
    """Replace whatever is called ``target`` by a file with ``data`` and ``mode``. Raises OSError."""
    part = target.with_name(f".{target.name[:100]}.{uuid.uuid4().hex}.part")

    def undo() -> None:
        with contextlib.suppress(OSError):
            part.unlink()

    with Undo(undo):
        with open(part, "xb") as out:
            out.write(data)
            out.flush()
            os.fsync(out.fileno())
        if mode is not None:
            os.chmod(part, stat.S_IMODE(mode))
        os.replace(part, target)
    sync_folder(target.parent)


def sync_folder(folder: Path) -> None:
    """Sync the names in ``folder`` to disk; a file system that cannot do this writes them later."""
    with contextlib.suppress(OSError):
        opened = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(opened)
        finally:
            os.close(opened)


def _mode_of(path: Path) -> int | None:
    try:
        return path.stat().st_mode
    except FileNotFoundError:
        return None
