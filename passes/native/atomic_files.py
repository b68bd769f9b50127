"""Write a file whole or not at all: beside its name first, onto the disk, and only then under its name.

Before: ``path.write_text(text)``, which a full disk tears. After: ``write_atomically(path, text)``.
"""

from __future__ import annotations

import contextlib
import os
import stat
import uuid
from pathlib import Path


def write_atomically(path: str | os.PathLike[str], content: str | bytes) -> None:
    """Replace the file ``path`` by ``content``, a text in UTF-8. Where that fails, OSError, the old file is as it was.

    A link is followed, and an old file's mode is kept. A device or a pipe (``/dev/stdout``) is written to as it is.
    """
    data = content.encode("utf-8") if isinstance(content, str) else content
    target = Path(os.path.realpath(path))
    mode = _mode_of(target)
    if mode is not None and not stat.S_ISREG(mode):  # a folder raises here
        target.write_bytes(data)
        return
    replace_file(target, data, mode)


def replace_file(target: Path, data: bytes, mode: int | None = None) -> None:
    """Put a file of ``data``, and of ``mode``, in the place of whatever is called ``target``. Raises OSError."""
    part = target.with_name(f".{target.name[:100]}.{uuid.uuid4().hex}.part")
    try:
        with open(part, "xb") as out:
            out.write(data)
            out.flush()
            os.fsync(out.fileno())
        if mode is not None:
            os.chmod(part, stat.S_IMODE(mode))
        os.replace(part, target)
    except BaseException:
        with contextlib.suppress(OSError):
            part.unlink()
        raise
    sync_folder(target.parent)


def sync_folder(folder: Path) -> None:
    """Have the names in ``folder`` on the disk; where a file system cannot, they get there later."""
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
