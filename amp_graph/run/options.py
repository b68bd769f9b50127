"""The options of ``amp-graph run``, checked before the script starts.

``RunOptions.checked(policy="bf16", report="report.html")``; AmpGraphError says what is wrong.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from amp_graph.errors import AmpGraphError
from amp_graph.passes.native.output_file import why_unwritable
from amp_graph.policy import Policy
from amp_graph.policy_words import HELD_LOW

VARIABLE = "AMP_GRAPH_POLICY"


@dataclass(frozen=True)
class RunOptions:
    """What ``amp-graph run`` was asked for; json: the exit report is JSON, in one line."""

    policy: Policy
    compile: str = "eager"
    dry_run: bool = False
    report: Path | None = None
    replace_autocast: bool = False
    json: bool = False

    @staticmethod
    def checked(policy: str | None = None, *, report: str | None = None, **others: Any) -> RunOptions:
        """Return the options, or raise AmpGraphError. Without ``policy``, the variable AMP_GRAPH_POLICY counts."""
        return RunOptions(_policy(policy), report=writable(report, "run: --report"), **others)


def _policy(given: str | None) -> Policy:
    text = given if given is not None else os.environ.get(VARIABLE) or None
    where = "" if given is not None or text is None else f" (from {VARIABLE})"
    try:
        policy = Policy.parse(text)
        for device in ("cpu",) if policy.emulate else ("cpu", "cuda"):
            policy.op_list(device)
    except AmpGraphError as error:
        raise AmpGraphError(f"run: {error}{where}") from error
    if policy.level in HELD_LOW:
        raise AmpGraphError(
            f"run: policy {text!r}{where}: level {policy.level} holds parameters and gradients in low precision, and "
            "the script, its optimizer and DDP have them in fp32 before its first step\n"
            "  legal: level O1, which keeps parameters in fp32\n"
            f"  fix:   amp-graph run --policy '{replace(policy, level='O1')}' train.py; or, for {policy.level}, "
            f"amp_graph.convert(model, '{policy}') in the script, before it makes the optimizer"
        )
    return policy


def writable(text: str | None, option: str, example: str = "report.html") -> Path | None:
    """Return the absolute path of a file to write: the script may change the working directory.

    ``option``: whose value ``text`` is, with its command: "run: --report". ``example``: a value that works.
    """
    if text is None:
        return None
    path = Path(os.path.abspath(text))
    why = "stdout is the script's" if text == "-" else why_unwritable(path)
    if why:
        raise AmpGraphError(
            f"{option} {text}: it cannot be written: {why}\n"
            "  legal: a file in a directory that exists and can be written\n"
            f"  fix:   {option.rpartition(' ')[2]} {example}"
        )
    return path


def check_compiler(name: str) -> None:
    """Raise AmpGraphError if ``name`` is no Dynamo backend. Dynamo is imported for other names than the default."""
    if name == "eager":
        return
    with contextlib.suppress(ImportError):
        from torch.compiler import list_backends

        legal = list_backends(exclude_tags=())
        if name not in legal:
            raise AmpGraphError(
                f"run: --compile {name}: there is no such compiler\n  legal: eager, {', '.join(legal)}\n"
                "  fix:   amp-graph run --compile inductor train.py"
            )
