"""Finds, from the frames of a call, the user's line that makes it: ``site_of_call()`` is "train.py:42"."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Iterator
from types import FrameType
from typing import NamedTuple

PACKAGES = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
PYTHON = os.path.dirname(os.__file__) + os.sep
HANDED_ON = ("__torch_function__", "__torch_dispatch__")  # functions that call what the user called
CHECKPOINT = os.path.join("torch", "utils", "checkpoint.py")


def _frames() -> Iterator[FrameType]:
    return (frame for frame, _ in traceback.walk_stack(sys._getframe(1)))


def caller_of_torch(frame: FrameType | None) -> FrameType | None:
    """Return ``frame``, or, of functions that hand a call on, the one that they stand for."""
    while frame is not None and frame.f_code.co_name in HANDED_ON:
        frame = frame.f_back
    return frame


class Place(NamedTuple):
    """A line of code; ``file`` as it can be opened from the current folder."""

    file: str
    line: int

    def __str__(self) -> str:
        """Return ``train.py:42``."""
        return f"{self.file}:{self.line}" if self.file else "unknown place"


NOWHERE = Place("", 0)


class Places:
    """Finds the user's line of a call; it remembers which files are the user's."""

    def __init__(self) -> None:
        self._names: dict[str, tuple[str, bool]] = {}  # with whether it is the user's; "" for torch's and ours

    @property
    def files(self) -> list[str]:
        """The user's files that were met."""
        return [name for name, is_users in self._names.values() if is_users]

    def of(self, frame: FrameType | None) -> Place:
        """Return the nearest line of the user's own files, from ``frame`` outwards; else the nearest of a library."""
        other = NOWHERE
        while frame is not None:
            name, is_users = self._named(frame)
            if is_users:
                return Place(name, frame.f_lineno)
            if name and other is NOWHERE:
                other = Place(name, frame.f_lineno)
            frame = frame.f_back
        return other

    def library_of(self, frame: FrameType | None) -> str:
        """Return "transformers.modeling:70 (forward)", the function that calls torch; "" if it is the user's own."""
        frame = caller_of_torch(frame)
        if frame is None or frame.f_code.co_filename.startswith("<") or self._named(frame)[1]:
            return ""
        return f"{frame.f_globals.get('__name__', '')}:{frame.f_lineno} ({frame.f_code.co_name})"

    def _named(self, frame: FrameType) -> tuple[str, bool]:
        file = frame.f_code.co_filename
        if file not in self._names:
            is_users = not (any(folder in file for folder in PACKAGES) or file.startswith(PYTHON))
            is_hidden = file.startswith("<") or _package_of(frame) in ("torch", "amp_graph")
            self._names[file] = ("", False) if is_hidden else (_relative(file), is_users)
        return self._names[file]


def _package_of(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]


def site_of_call() -> str:
    """Return the line of the call: the nearest one of the user's own files, else the nearest outside of torch."""
    place = Places().of(sys._getframe(1))
    return str(place) if place.file else ""


def called_by_script() -> bool:
    """Return whether the nearest caller outside of torch and of this room is the script, or a library that it uses."""
    here = __name__.rpartition(".")[0]
    outside = (_package_of(frame) for frame in _frames() if frame.f_globals.get("__package__") != here)
    return next((name for name in outside if name != "torch"), "amp_graph") != "amp_graph"


def _relative(file: str) -> str:
    try:
        found = os.path.relpath(file)
    except ValueError:  # another drive
        return file
    return file if found.startswith(os.pardir) else found


def is_checkpointed_call() -> bool:
    """Return whether the call is made by ``torch.utils.checkpoint``, which repeats it in backward."""
    return any(frame.f_code.co_filename.endswith(CHECKPOINT) for frame in _frames())
