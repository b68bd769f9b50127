"""Runs the scripts of the tests as ``amp-graph audit`` does, in this process, and reads what they expect.

A script of ``scripts/`` takes one word, "faulty" or "right". A line that ends with ``# expect: AMP101`` is where that
finding must be when it is faulty, and none of these codes may be found when it is right. It prints its losses.
"""

import contextlib
import io
import json
import os
import random
import re
import sys
import warnings
from dataclasses import dataclass, replace
from pathlib import Path

import numpy
import torch

from amp_graph.audit.audit_report import AuditReport
from amp_graph.audit.audit_text import WIDTH
from amp_graph.audit.session import Audit
from amp_graph.run.script import StepsAreOver, execute, script_target

SCRIPTS = Path(__file__).with_name("scripts")
CLEAN = Path(__file__).with_name("clean")
DOCS = Path(__file__).parents[2] / "docs"
TYPES = {"text": str, "number": (int, float), "true or false": bool, "list": list, "table": dict}
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


def trained(step, parameters, steps=3, optimizer=torch.optim.SGD, **options):
    """Audit a training, which goes down the gradient of what ``step`` returns; return the audit."""
    optimizer = optimizer(parameters, lr=1e-3)
    with Audit(**options) as audit:
        for _ in range(steps):
            step().backward()
            optimizer.step()
            optimizer.zero_grad()
    return audit


def expected(path):
    """Return the findings that the script at ``path`` expects, as (code, line)."""
    lines = enumerate(path.read_text("utf-8").splitlines(), start=1)
    marked = ((n, found[1]) for n, line in lines if (found := EXPECTED.search(line)))
    return {(code, n) for n, codes in marked for code in re.findall(r"AMP\d{3}", codes)}


def found(run, path):
    """Return the findings of a run that are in the script at ``path``, as (code, line)."""
    return {(f.code, f.place.line) for f in run.report.findings if Path(f.place.file).name == path.name}


# -- the views of a report --------------------------------------------------------------------------------


def keys_of_the_docs():
    """Return {path of a key: its type} of the table of the docs."""
    table = (DOCS / "audit.md").read_text().partition("## As plain values")[2]
    return dict(re.findall(r"^\| `([\w.\[\]*]+)` \| ([a-z ]+) \|", table, re.MULTILINE))


def keys_of(value, path=""):
    """Yield (path, value) of all keys: ``findings[].code``; ``*`` is a key that is a dtype or a name."""
    if isinstance(value, dict):
        free = re.fullmatch(r"between_ranks|outside_of_models|modules\[\]\.\w+|findings\[\]\.evidence", path)
        for key, inner in value.items():
            name = f"{path}.{'*' if free else key}".strip(".")
            yield name, inner
            yield from keys_of(inner, name) if not name.startswith("findings[].evidence") else ()
    elif isinstance(value, list):
        for inner in value:
            yield from keys_of(inner, f"{path}[]")


def is_a(value, kind):
    """Say whether a value is of a type of the docs; true is no number."""
    return kind not in TYPES or (
        isinstance(value, TYPES[kind]) and isinstance(value, bool) == (kind == "true or false")
    )


def faults_in(data):
    """Return what in ``data`` is not as the docs have it."""
    documented = keys_of_the_docs()
    found = list(keys_of(data))
    unknown = [f"{path} is not documented" for path, _ in found if path not in documented]
    wrong = [f"{path} is {value!r}" for path, value in found
             if path in documented and not is_a(value, documented[path])]  # fmt: skip
    return sorted({*unknown, *wrong})


def assert_readable(report):
    """Assert that the data is as the docs say, and that all lines but long names fit in 80 columns."""
    report = replace(report, plan=())  # which takes seconds to make
    assert faults_in(json.loads(json.dumps(report.to_dict()))) == []
    too_long = [line for line in report.text().splitlines() if len(line) > WIDTH]
    assert [line for line in too_long if " " in line.strip()] == []
