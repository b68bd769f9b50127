"""Finds, from the frames of a call, the user's line that makes it: ``site_of_call()`` is "train.py:42"."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from types import FrameType

PACKAGES = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
PYTHON = os.path.dirname(os.__file__) + os.sep
CHECKPOINT = os.path.join("torch", "utils", "checkpoint.py")


def _frames() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def site_of_call() -> str:
    """Return the line of the call: the nearest one of the user's own files, else the nearest outside of torch."""
    other = ""
    for frame in _frames():
        file = frame.f_code.co_filename
        if file.startswith("<") or frame.f_globals.get("__name__", "").partition(".")[0] in ("torch", "amp_graph"):
            continue
        place = f"{_relative(file)}:{frame.f_lineno}"
        if not any(folder in file for folder in PACKAGES) and not file.startswith(PYTHON):
            return place
        other = other or place
    return other


def called_by_script() -> bool:
    """Return whether the nearest caller outside of torch and of this room is the script, or a library that it uses."""
    names = (frame.f_globals.get("__name__", "") for frame in _frames())
    others = (name for name in names if name.partition(".")[0] != "torch" and not name.startswith("amp_graph.run."))
    return next(others, "amp_graph").partition(".")[0] != "amp_graph"


def _relative(file: str) -> str:
    try:
        found = os.path.relpath(file)
    except ValueError:  # another drive
        return file
    return file if found.startswith(os.pardir) else found


def is_checkpointed_call() -> bool:
    """Return whether the call is made by ``torch.utils.checkpoint``, which repeats it in backward."""
    return any(frame.f_code.co_filename.endswith(CHECKPOINT) for frame in _frames())
