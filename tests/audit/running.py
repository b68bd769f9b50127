"""Runs the scripts of the tests as ``amp-graph audit`` does, in this process, and reads what they expect.

A script of ``scripts/`` takes one word, "faulty" or "right". A line that ends with ``# expect: AMP101`` is where that
finding must be when it is faulty, and none of these codes may be found when it is right. It prints its losses.
"""

import contextlib
import io
import os
import random
import re
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path

import numpy
import torch

from amp_graph.audit.audit_report import AuditReport
from amp_graph.audit.session import Audit
from amp_graph.run.script import StepsAreOver, execute, script_target

SCRIPTS = Path(__file__).with_name("scripts")
CLEAN = Path(__file__).with_name("clean")
EXPECTED = re.compile(r"# expect: ((?:AMP\d{3}[ ,]*)+)")


@dataclass(frozen=True)
class Run:
    """One run of a script: its report if it was audited, what it printed, how it ended, and the random state."""

    report: AuditReport | None
    printed: str
    error: str
    random: tuple[bytes, ...]


def run_script(path, *words, audited=True, **options):
    """Run the script at ``path`` in this process, from the same random state each time."""
    kept = sys.argv, sys.path[:], sys.modules["__main__"]
    torch.manual_seed(0)
    random.seed(0)
    numpy.random.seed(0)
    audit, printed, failure = Audit(**options), io.StringIO(), ""
    try:
        with (
            warnings.catch_warnings(record=True),
            contextlib.redirect_stdout(printed),
            audit if audited else contextlib.nullcontext(),
        ):
            warnings.simplefilter("always")
            execute(script_target(os.path.relpath(path)), list(words))
    except StepsAreOver:
        pass
    except (Exception, SystemExit) as error:
        failure = f"{type(error).__name__}: {error}"
    finally:
        sys.argv, sys.path[:], sys.modules["__main__"] = *kept[:2], kept[2]
        torch.set_default_dtype(torch.float32)
    state = (
        torch.get_rng_state().numpy().tobytes(),
        repr(random.getstate()).encode(),
        repr(numpy.random.get_state()).encode(),
    )
    return Run(audit.report() if audited else None, printed.getvalue(), failure, state)


def expected(path):
    """Return the findings that the script at ``path`` expects, as (code, line)."""
    lines = enumerate(path.read_text("utf-8").splitlines(), start=1)
    marked = ((n, found[1]) for n, line in lines if (found := EXPECTED.search(line)))
    return {(code, n) for n, codes in marked for code in re.findall(r"AMP\d{3}", codes)}


def found(run, path):
    """Return the findings of a run that are in the script at ``path``, as (code, line)."""
    return {(f.code, f.place.line) for f in run.report.findings if Path(f.place.file).name == path.name}
