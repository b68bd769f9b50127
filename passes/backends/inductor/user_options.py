"""The ``mode`` and ``options`` of ``torch.compile`` as options of Inductor, checked.

Before: ``mode="max-autotune", options={"shape_padding": False}``. After: one dictionary for ``config_patches``.
"""

from __future__ import annotations

import difflib
import typing
from collections.abc import Mapping
from typing import Any

from amp_graph.passes.torch_compat.inductor import inductor_config, mode_options

DEFAULT = (None, "default")
RECORDS = "triton.cudagraphs"  # records what it compiles in CUDA graphs; part of two modes


def resolved(mode: str | None, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of ``mode`` and ``options``, which take precedence; both are checked."""
    given = {name.replace("-", "_"): setting for name, setting in options.items()}
    return {**mode_options().get(mode or "default", {}), **given}


def why_not(mode: Any, options: Mapping[Any, Any]) -> tuple[str, str]:
    """Return what is wrong with a mode and options, and what is legal; empty strings if nothing is."""
    if mode not in DEFAULT and (not isinstance(mode, str) or mode not in mode_options()):
        return f"unknown mode={mode!r}", ", ".join(mode_options())
    for name, setting in options.items():
        wrong, legal = _why_not(name, setting)
        if wrong:
            return wrong, legal
    return "", ""


def _why_not(name: Any, setting: Any) -> tuple[str, str]:
    config = inductor_config()
    known: dict[str, Any] = config.get_config_copy()
    if not isinstance(name, str) or name.replace("-", "_") not in known:
        near = difflib.get_close_matches(str(name), known, 3, 0.6)
        what = ", ".join(near) if near else "the names in torch._inductor.config, such as max_autotune"
        return f"unknown option {name!r}", what
    wanted: Any = config.get_type(name.replace("-", "_"))
    # As torch.compile, which checks no generic types.
    if typing.get_origin(wanted) is None and isinstance(wanted, type) and not isinstance(setting, wanted):
        return f"option {name!r} is {setting!r}", f"a value of type {wanted.__name__}"
    return "", ""
