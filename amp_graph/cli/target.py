"""Loads TARGET of the command line: a model and the inputs to call it with.

``torchvision.models:resnet18`` or ``path/file.py:build`` becomes ``Target(model, args, kwargs)``.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch

from amp_graph.cli.input_spec import SpecError, make_inputs, pointed
from amp_graph.lists.errors import Undo
from amp_graph.policy import Policy

EXAMPLE = "torchvision.models:resnet18, or path/to/file.py:build_model"
LEGAL = "package.module:name or path/file.py:name"
VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
GIVES = "a torch.nn.Module, or (module, inputs) where inputs is a tensor, a tuple or a dict"


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

    Raises SpecError for a wrong TARGET; errors of the user's own code propagate. has_batch: the caller has the inputs.
    """
    model, args, kwargs = _model_and_inputs(_built(text, named(text)), text)
    if inputs:
        device = next((p.device for p in model.parameters()), torch.device("cpu"))
        args, kwargs = _fitted(model, *make_inputs(inputs, device))
    if not has_batch:
        _check_call(model, args, kwargs)
    return Target(model, args, kwargs)


def named(text: str) -> Any:
    """Return the object that TARGET names."""
    where, colon, name = text.rpartition(":")
    if not colon:
        raise pointed("TARGET", "no ':' before a name", text, len(text), LEGAL, EXAMPLE)
    if not where or not name:
        at, what = (0, "nothing before ':'") if not where else (len(text), "nothing after ':'")
        raise pointed("TARGET", what, text, at, LEGAL, EXAMPLE)
    found: Any = _from_file(where, text) if where.endswith(".py") else _from_package(where, text)
    at = len(where) + 1
    for part in name.split("."):
        if not hasattr(found, part):
            raise _no_attribute(found, part, text, at)
        found, at = getattr(found, part), at + len(part) + 1
    return found


def _no_attribute(found: Any, part: str, text: str, at: int) -> SpecError:
    public = [n for n in vars(found) if not n.startswith("_")] if hasattr(found, "__dict__") else []
    near = difflib.get_close_matches(part, public, 3, 0.5)
    hint = f"; did you mean {', '.join(near)}?" if near else ""
    home = str(getattr(found, "__name__", type(found).__name__))
    what = f"{home} has no {part!r}{hint}"
    own = [n for n in public if getattr(getattr(found, n), "__module__", "") == home]
    legal = ", ".join(own[:12]) or f"a name in it that is {GIVES}"
    return pointed("TARGET", what, text, at, legal, EXAMPLE)


def _from_file(where: str, text: str) -> ModuleType:
    path = os.path.abspath(os.path.expanduser(where))
    if not os.path.isfile(path):
        raise pointed("TARGET", f"no file {where}", text, 0, "the path of a Python file", EXAMPLE)
    name = os.path.splitext(os.path.basename(path))[0]
    if os.path.dirname(path) not in sys.path:  # as `python file.py` does: it can import its neighbors
        sys.path.insert(0, os.path.dirname(path))
    known = sys.modules.get(name)
    if known is not None and os.path.abspath(getattr(known, "__file__", None) or "") != path:
        name = f"amp_graph_target_{name}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None, "a path that ends in .py has a loader"
    assert spec.loader is not None, "a path that ends in .py has a loader"
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    with Undo(lambda: sys.modules.pop(name)):
        spec.loader.exec_module(module)
    return module


def _from_package(where: str, text: str) -> ModuleType:
    if os.getcwd() not in sys.path and "" not in sys.path:  # as `python -m` does
        sys.path.insert(0, os.getcwd())
    try:
        return importlib.import_module(where)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{where}.".startswith(f"{error.name}."):
            raise  # an import inside the user's module failed
        what = f"no module {error.name!r}"
        legal = f"{LEGAL}; installed, or below the current directory"
        raise pointed("TARGET", what, text, 0, legal, EXAMPLE) from None
    except ValueError as error:  # "..", or an empty name
        raise pointed("TARGET", str(error), text, 0, LEGAL, EXAMPLE) from None
    except TypeError:  # a relative name
        raise pointed("TARGET", f"{where!r} is relative", text, 0, LEGAL, EXAMPLE) from None


def _built(text: str, found: Any) -> Any:
    """Call a function that builds a model; return a model unchanged."""
    if isinstance(found, (torch.nn.Module, tuple, list)):
        return found
    at = text.rindex(":") + 1
    if not callable(found):
        what = f"{text[at:]} is a {type(found).__name__}"
        raise pointed("TARGET", what, text, at, f"{GIVES}, or a function that returns it", EXAMPLE)
    try:
        inspect.signature(found).bind()
    except TypeError as error:
        what = f"{text[at:]} cannot be called without arguments: {error}"
        example = "def build_model(): return Model(width=64), torch.randn(8, 64)"
        raise pointed("TARGET", what, text, at, "a callable that needs no argument", example) from None
    except ValueError:  # a builtin without a signature: just call it
        pass
    return found()


def _model_and_inputs(made: Any, text: str) -> tuple[torch.nn.Module, tuple[Any, ...], dict[str, Any]]:
    if isinstance(made, torch.nn.Module):
        return made, (), {}
    if isinstance(made, (tuple, list)) and len(made) == 2 and isinstance(made[0], torch.nn.Module):
        model, given = made
        if isinstance(given, Mapping):
            return model, (), dict(given)
        return model, tuple(given) if isinstance(given, (tuple, list)) else (given,), {}
    kinds = ", ".join(type(one).__name__ for one in made) if isinstance(made, (tuple, list)) else ""
    what = f"it returns a {type(made).__name__}{f' of ({kinds})' if kinds else ''}"
    example = "def build_model(): return Model(), (torch.randn(8, 64),)"
    raise pointed("TARGET", what, text, text.rindex(":") + 1, GIVES, example)


def _fitted(
    model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Pass a single input by position if forward needs just one, under another name than the user's."""
    parameters = inspect.signature(model.forward).parameters
    needed = [n for n, p in parameters.items() if p.default is p.empty and p.kind not in VARIADIC]
    takes_any = any(p.kind == p.VAR_KEYWORD for p in parameters.values())
    renamed = len(kwargs) == 1 and not args and len(needed) == 1 and not takes_any and not kwargs.keys() & {*parameters}
    return (tuple(kwargs.values()), {}) if renamed else (args, kwargs)


def _check_call(model: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Refuse inputs that do not match forward's signature, before anything runs."""
    try:
        signature = inspect.signature(model.forward)
    except (TypeError, ValueError):
        return
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        needed = {n: p for n, p in signature.parameters.items() if p.default is p.empty}
        names = [n for n, p in needed.items() if n not in kwargs and p.kind not in VARIADIC]
        missing = ",".join(f"{name}=f32[8,16]" for name in names[len(args) :]) or "f32[8,16]"
        shown = [*(type(a).__name__ for a in args), *kwargs]
        raise SpecError(
            f"--input: {type(model).__name__}.forward{signature} cannot be called with "
            f"({', '.join(shown)}): {error}\n"
            f"  legal: inputs that fit its parameters\n  example: --input {missing!r}"
        ) from None
