"""Finds, from the frames of a call, the user's line that makes it, and the module whose ``forward`` makes it.

``site_of_call()`` is "train.py:42"; ``owner_of_call(encoder)`` is the model whose ``model.forward(x)`` called encoder.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from types import FrameType

import torch

OURS = f"{os.sep}amp_graph{os.sep}run{os.sep}"
PACKAGES = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
PYTHON = os.path.dirname(os.__file__) + os.sep
CHECKPOINT = os.path.join("torch", "utils", "checkpoint.py")


def _frames() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if OURS not in frame.f_code.co_filename:
            yield frame
        frame = frame.f_back


def site_of_call() -> str:
    """Return the line of the call: the nearest one of the user's own files, else the nearest outside of torch."""
    other = ""
    for frame in _frames():
        file = frame.f_code.co_filename
        place = f"{_relative(file)}:{frame.f_lineno}"
        if file.startswith("<") or frame.f_globals.get("__name__", "").partition(".")[0] in ("torch", "amp_graph"):
            continue
        if not any(folder in file for folder in PACKAGES) and not file.startswith(PYTHON):
            return place
        other = other or place
    return other


def called_by_script() -> bool:
    """Return whether the nearest caller outside of torch and of this room is the script, or a library that it uses."""
    for frame in _frames():
        package = frame.f_globals.get("__name__", "").partition(".")[0]
        if package != "torch":
            return package != "amp_graph"
    return False


def _relative(file: str) -> str:
    try:
        found = os.path.relpath(file)
    except ValueError:  # another drive
        return file
    return file if found.startswith(os.pardir) else found


def owner_of_call(module: torch.nn.Module) -> torch.nn.Module:
    """Return the outermost module in whose ``forward``, called directly, ``module`` is called; else ``module``."""
    owner = module
    for frame in _frames():
        if frame.f_code.co_name == "forward" and frame.f_code.co_argcount:
            found = frame.f_locals.get(frame.f_code.co_varnames[0])
            own = isinstance(found, torch.nn.Module) and getattr(type(found).forward, "__code__", None)
            if isinstance(found, torch.nn.Module) and own is frame.f_code and _holds(found, owner):
                owner = found
    return owner


def _holds(outer: torch.nn.Module, inner: torch.nn.Module) -> bool:
    return any(part is inner for part in outer.modules())


def is_checkpointed_call() -> bool:
    """Return whether the call is made by ``torch.utils.checkpoint``, which repeats it in backward."""
    return any(frame.f_code.co_filename.endswith(CHECKPOINT) for frame in _frames())
