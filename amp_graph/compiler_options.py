"""``mode=`` and ``options=`` of ``convert``, ``TrainStep`` and the Dynamo backend: checked, and merged into one.

Before: ``compile="inductor", mode="max-autotune", options={"shape_padding": False}``. After: Inductor's options.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from amp_graph.errors import PolicyError
from amp_graph.passes.backends.inductor.compile import DEFAULT, RECORDS, resolved, why_not

Options = Mapping[str, Any]


def read_options(
    caller: str, compile: str | Callable[..., Any], mode: Any, options: Any, *, example: str = ""
) -> dict[str, Any]:
    """Return Inductor's options for ``mode`` and ``options``, which take precedence.

    Raises PolicyError for an unknown mode or option, or if ``compile`` is not Inductor. example: the fix, as code.
    """
    if not isinstance(options, Mapping | None):
        raise PolicyError(
            f"{caller}: options={options!r} is a {type(options).__name__}\n"
            "  legal: a dictionary of Inductor's options\n"
            "  fix:   options={'max_autotune': True}"
        )
    given = dict(options or {})
    wrong, legal = why_not(mode, given)
    if wrong:
        fix = example or "compile='inductor', mode='max-autotune-no-cudagraphs'"
        raise PolicyError(f"{caller}: {wrong}\n  legal: {legal}\n  fix:   {fix}")
    if compile != "inductor" and (mode not in DEFAULT or given):
        what = f"mode={mode!r} is one" if mode not in DEFAULT else f"{', '.join(map(repr, given))} in options are"
        how = compile if isinstance(compile, str) else getattr(compile, "__name__", "a callable")
        raise PolicyError(
            f"{caller}: {what} of Inductor's, and compile={how!r}\n  legal: mode and options with compile='inductor'\n"
            "  fix:   compile='inductor', or neither mode nor options"
        )
    return resolved(mode, given)


def refuse_recording(found: Options) -> None:
    """Raise PolicyError if a step's options ask Inductor for CUDA graphs: it records no graph that updates in place."""
    if found.get(RECORDS):
        raise PolicyError(
            "TrainStep: mode or options ask Inductor to record CUDA graphs, and it records no graph that writes to "
            "its inputs, as a step does to parameters\n"
            "  legal: mode='max-autotune-no-cudagraphs', and any options with 'triton.cudagraphs': False\n"
            "  fix:   TrainStep(..., compile='inductor', cuda_graph=True), which records the whole step"
        )


def options_text(found: Options) -> str:
    """Return options as text for a report: " (max_autotune=True)"."""
    return f" ({', '.join(f'{name}={setting!r}' for name, setting in sorted(found.items()))})" if found else ""
