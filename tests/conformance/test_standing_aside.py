"""Every pass raises, one at a time, half way through its work: no call fails, and results stay within autocast's error.

`python -m tests.conformance.test_standing_aside gpt2 vit` prints the worst ratio of errors for each case.
"""

import contextlib
import copy
import sys
import warnings

import pytest
import torch

import amp_graph
from amp_graph.captured_graphs import CapturedGraphs
from amp_graph.errors import AmpGraphWarning, PassError
from amp_graph.passes.base import Pass
from amp_graph.passes.node_value import tensors
from amp_graph.rewrite import copy_graph
from tests.corpus import CASES, make
from tests.passes.graphs import run_step

# Cases that together give most passes something to do.
SAMPLE = ("bert_sdpa", "resnet_basic", "lstm_lm", "conformer_glu")
NOT_COMPARED = {"random", "integer", "no_autocast"}
# Of an error of autocast's, over one graph and one draw; a share of a low-precision rounding where autocast makes none.
WITHIN, FLOOR = 1.5, 2.0**-9


def graphs_of(name, trains):
    """The graphs that a converted case is captured as, with what they were called with, and what captured them."""
    found = []
    own = CapturedGraphs._rewritten

    def noted(self, gm):
        found.append((self, copy_graph(gm)))
        return own(self, gm)

    def called(self, run, *args, **kwargs):
        place = len(found) - 1

        def noting(*given):
            if len(found[place]) == 2:
                found[place] = (*found[place], tuple(map(_copied, given)))
            return run(*given)

        return count(self, noting, *args, **kwargs)

    count = CapturedGraphs._counted
    model, args, kwargs = make(name)
    model.train(trains)
    amp_graph.convert(model, "bf16")
    with pytest.MonkeyPatch.context() as patch, torch.set_grad_enabled(trains):
        patch.setattr(CapturedGraphs, "_rewritten", noted)
        patch.setattr(CapturedGraphs, "_counted", called)
        model(*args, **kwargs)
    return model, [one for one in found if len(one) == 3]


def _copied(a):
    if not isinstance(a, torch.Tensor) or isinstance(a, torch.nn.Parameter):
        return a
    return a.detach().clone().requires_grad_(a.requires_grad)


@contextlib.contextmanager
def raising(kind, half_way=True):
    """Let passes of class ``kind`` raise behind what they do."""
    own = kind.run

    def run(self, gm):
        if half_way:
            own(self, gm)
        raise KeyError("made to fail")

    kind.run = run
    try:
        yield
    finally:
        kind.run = own


def errors(step, exact):
    """The error of all outputs, and of all gradients, as a share of their size."""
    found = []
    for what in ("outputs", "grads"):
        pairs = [
            (x.double(), y.double())
            for x, y in zip(getattr(step, what), getattr(exact, what), strict=True)
            if x is not None and y is not None and y.is_floating_point()
        ]
        size = sum(float(y.square().sum()) for _, y in pairs) ** 0.5
        off = sum(float((x - y).square().sum()) for x, y in pairs) ** 0.5
        found.append(off / size if size else off)
    return found


def kinds_of(captured, gm, trains):
    """The classes of the passes that run over a captured graph, and of those that change it."""
    with torch.set_grad_enabled(trains):
        rewritten = captured._rewritten(copy_graph(gm))
    by_name = {kind.name: kind for kind in all_passes()}
    done = [by_name[timed.name] for timed in rewritten.passes]
    return done, {by_name[timed.name] for timed in rewritten.passes if timed.result.modified}


def all_passes():
    """Every class of passes."""
    found, seen = [Pass], []
    while found:
        kind = found.pop()
        seen.append(kind)
        found += kind.__subclasses__()
    return [kind for kind in seen if isinstance(getattr(kind, "name", None), str)]


def check(name, trains):
    """Return the worst ratio of an error to the one allowed, and by which pass; raises where a call fails."""
    model, graphs = graphs_of(name, trains)
    worst = (0.0, "")
    for captured, gm, given in graphs:
        compared = not CASES[name].tags & NOT_COMPARED and any(
            t.is_floating_point() for n in gm.graph.nodes for t in tensors(n.meta.get("example_value"))
        )
        done, change = kinds_of(captured, gm, trains)
        with torch.set_grad_enabled(trains):
            exact = run_step(gm, given)
            with torch.autocast("cpu", torch.bfloat16):
                theirs = errors(run_step(gm, given), exact) if compared else [0.0, 0.0]
        for kind in done:
            step = _run_without(captured, gm, given, kind, trains)
            if not compared or (kind not in change and not kind.required):
                continue
            for ours, allowed in zip(errors(step, exact), theirs, strict=True):
                worst = max(worst, (ours / (allowed * WITHIN + FLOOR), kind.name))
    del model
    return worst


def _run_without(captured, gm, given, kind, trains):
    """Run the graph with passes of ``kind`` raising; the warning, and the report, name them."""
    before = len(captured.graphs)
    with torch.set_grad_enabled(trains), warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        with raising(kind):
            run = captured.take(copy_graph(gm), given)
            step = run_step(run, given)
    assert any(kind.name in str(w.message) for w in said if w.category is AmpGraphWarning), kind.name
    record = captured.graphs.pop()
    assert len(captured.graphs) == before
    rewritten = record.rewritten
    told = [t.name for t in rewritten.passes if t.failure] or [rewritten.gm.meta["amp_unplanned"]]
    assert any(kind.name in one for one in told)
    return step


@pytest.fixture(autouse=True)
def _not_strict(monkeypatch):
    monkeypatch.setenv("AMP_GRAPH_STRICT", "0")


@pytest.mark.parametrize("trains", [True, False])
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in SAMPLE else [pytest.mark.slow]) for n in sorted(CASES)]
)
def test_no_call_fails_and_results_are_as_exact(name, trains):
    ratio, by = check(name, trains)
    assert ratio <= 1, by


def test_control_where_strict_the_pass_is_an_error(monkeypatch):
    monkeypatch.setenv("AMP_GRAPH_STRICT", "1")
    with pytest.raises((PassError, torch._dynamo.exc.BackendCompilerFailed)):
        check("resnet_basic", True)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    for one in sys.argv[1:] or sorted(CASES):
        print(one, *(check(copy.copy(one), trains) for trains in (True, False)), flush=True)
