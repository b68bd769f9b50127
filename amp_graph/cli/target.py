"""Loads TARGET of the command line: a model and the inputs to call it with.

``torchvision.models:resnet18`` or ``path/file.py:build`` becomes ``Target(model, args, kwargs)``.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import os
import sys
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from amp_graph.cli.input_spec import make_inputs, pointed
from amp_graph.errors import AmpGraphError
from amp_graph.lists.errors import Undo
from amp_graph.lists.read_toml import did_you_mean
from amp_graph.policy import Policy

EXAMPLE = "torchvision.models:resnet18, or path/to/file.py:build_model"
LEGAL = "package.module:name or path/file.py:name, installed, or below the current directory"
GIVES = "a torch.nn.Module, or (module, inputs) with a tensor, tuple or dict, or a function without arguments for it"
VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


@dataclass(frozen=True)
class Target:
    """A model, the inputs to call it with, and the policy that it is to be converted with."""

    model: torch.nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    policy: Policy = field(default_factory=Policy)

    def call(self, model: torch.nn.Module) -> Any:
        """Call ``model``, which may be a copy, with the inputs."""
        return model(*self.args, **self.kwargs)

    def named_inputs(self) -> dict[str, Any]:
        """Return the inputs by the names of forward's parameters."""
        return dict(inspect.signature(self.model.forward).bind(*self.args, **self.kwargs).arguments)


def load_target(text: str, inputs: Sequence[str] = (), *, has_batch: bool = False) -> Target:
    """Import and call the object that ``text`` names; ``inputs`` (SPECs) replace the inputs that it returns.

    Raises AmpGraphError for a wrong TARGET; the user's own errors propagate. has_batch: the caller has the inputs.
    """
    found = named(text)
    if callable(found) and not isinstance(found, torch.nn.Module):
        found = found()
    model, given = found if isinstance(found, (tuple, list)) and len(found) == 2 else (found, ())
    if not isinstance(model, torch.nn.Module):
        at = text.rindex(":") + 1
        raise pointed("TARGET", f"{text[at:]} gives a {type(found).__name__}", text, at, GIVES, EXAMPLE)
    args, kwargs = ((), dict(given)) if isinstance(given, Mapping) else (given, {})
    args = tuple(args) if isinstance(args, (tuple, list)) else (args,)
    if inputs:
        device = next((p.device for p in model.parameters()), torch.device("cpu"))
        args, kwargs = _fitted(model, *make_inputs(inputs, device))
    if not has_batch:
        _check_call(model, args, kwargs)
    return Target(model, args, kwargs)


def named(text: str) -> Any:
    """Return the object that TARGET names."""
    where, colon, name = text.rpartition(":")
    if not where or not name:
        raise pointed("TARGET", "no name" if colon else "no ':' before a name", text, len(text), LEGAL, EXAMPLE)
    module = _from_file(where, text) if where.endswith(".py") else _from_package(where, text)
    try:
        return functools.reduce(getattr, name.split("."), module)
    except AttributeError as error:
        near = did_you_mean(name, dir(module))
        raise pointed("TARGET", f"{error}{near}", text, len(where) + 1, LEGAL, EXAMPLE) from error


def _from_package(where: str, text: str) -> Any:
    if os.getcwd() not in sys.path and "" not in sys.path:  # as `python -m` does
        sys.path.insert(0, os.getcwd())
    try:
        return importlib.import_module(where)
    except (ModuleNotFoundError, TypeError, ValueError) as error:
        if isinstance(error, ModuleNotFoundError) and not f"{where}.".startswith(f"{error.name}."):
            raise  # an import inside of the user's module failed
        raise pointed("TARGET", str(error), text, 0, LEGAL, EXAMPLE) from error


def _from_file(where: str, text: str) -> Any:
    """Import a file, which can import its neighbours as with `python file.py`."""
    path = os.path.abspath(where)
    name = os.path.splitext(os.path.basename(path))[0]
    if os.path.dirname(path) not in sys.path:
        sys.path.insert(0, os.path.dirname(path))
    known = sys.modules.get(name)
    if known is not None and os.path.abspath(getattr(known, "__file__", None) or "") != path:
        name = f"target_{zlib.crc32(path.encode()):x}_{name}"  # one name for each file: Dynamo finds globals by it
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None or not os.path.isfile(path):
        raise pointed("TARGET", f"no file {where}", text, 0, LEGAL, EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    with Undo(lambda: sys.modules.pop(name)):
        spec.loader.exec_module(module)
    return module


def _fitted(
    model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Pass a single input by position if forward needs just one, under another name than the user's."""
    parameters = inspect.signature(model.forward).parameters
    needed = [n for n, p in parameters.items() if p.default is p.empty and p.kind not in VARIADIC]
    is_named = any(p.kind == p.VAR_KEYWORD or name in kwargs for name, p in parameters.items())
    is_single = len(kwargs) == 1 and not args and len(needed) == 1
    return (tuple(kwargs.values()), {}) if is_single and not is_named else (args, kwargs)


def _check_call(model: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Refuse inputs that do not match forward's signature, before anything runs."""
    signature = inspect.signature(model.forward)
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        shown = ", ".join([*(type(a).__name__ for a in args), *kwargs])
        raise AmpGraphError(
            f"--input: {type(model).__name__}.forward{signature} cannot be called with ({shown}): {error}\n"
            "  legal: inputs that fit its parameters\n  example: --input 'x=f32[8,16]'"
        ) from None
