"""The manager runs passes in order, times them, verifies them, and says where they failed."""

from contextlib import nullcontext
from dataclasses import dataclass

import pytest
import torch

from amp_graph.passes.base import Change, Pass, PassError, PassResult, Skip, VerifyError
from amp_graph.passes.casts import insert_casts
from amp_graph.passes.graph.edit import set_value
from amp_graph.passes.graph.fake_values import value
from amp_graph.passes.graph.identify_ops import IdentifyOps
from amp_graph.passes.manager import VERIFY, run_passes
from amp_graph.passes.precision import plan_precision
from tests.passes.graphs import BF16, capture_function, standard_passes

X, W = torch.randn(2, 4), torch.randn(4, 4)


def model(s, x):
    h = x @ s.w
    return h.exp()  # the user's line


@dataclass(frozen=True)
class Nothing(Pass):
    def run(self, gm):
        return PassResult(gm, (), (Skip("exp", "on purpose"),))


@dataclass(frozen=True)
class Crashes(Pass):
    def run(self, gm):
        for node in gm.graph.nodes:
            if node.name == "exp":
                raise KeyError("lost")
        return PassResult(gm)


@dataclass(frozen=True)
class Lies(Pass):
    def run(self, gm):
        node = next(n for n in gm.graph.nodes if n.name == "h")
        set_value(node, value(node).to(BF16))
        return PassResult(gm, (Change("lies", "lied", "h", "for the test"),))


@pytest.fixture
def gm():
    fresh = capture_function(model, X, w=W).fresh()
    run_passes(fresh, [IdentifyOps()], checked=True)
    return fresh


def test_results_come_named_in_order_with_changes_skips_and_seconds(gm):
    done = run_passes(gm, [Nothing(), *standard_passes()], checked=True)
    assert [d.name for d in done] == ["nothing", *[p.name for p in standard_passes()]]
    assert done[0].result.skips == (Skip("exp", "on purpose"),)
    assert not done[0].result.modified
    assert all(d.seconds >= 0 for d in done)
    for change in (c for d in done for c in d.result.changes):
        assert change.rule
        assert change.action
        assert change.node
        assert change.reason


def test_a_crash_is_a_pass_error_with_the_pass_and_the_cause(gm):
    with pytest.raises(PassError, match=r"pass crashes failed: KeyError: 'lost'") as caught:
        run_passes(gm, [Crashes()])
    assert isinstance(caught.value.__cause__, KeyError)


# What a kernel refuses is computed in full (run_node raises): what saves the result has no such way out.
@pytest.mark.parametrize(("module", "name"), [(plan_precision, "classified"), (insert_casts, "set_value")])
def test_a_crash_names_the_node_and_the_users_line(gm, monkeypatch, module, name):
    own = getattr(module, name)

    def crashes(node, *args):
        if node.name == "exp" or module is insert_casts:
            raise KeyError("lost")
        return own(node, *args)

    monkeypatch.setattr(module, name, crashes)
    node = "exp" if module is plan_precision else "h"
    with pytest.raises(PassError) as caught:
        run_passes(gm, standard_passes())
    text = str(caught.value)
    assert "plan-precision" in text or "insert-casts" in text
    assert f" at {node}:" in text or f" {node} = " in text, text
    assert "test_manager.py" in text, "the user's line"


def test_a_broken_contract_names_pass_node_and_line(gm):
    with pytest.raises(VerifyError, match=r"after pass lies: verify: h = matmul\(") as caught:
        run_passes(gm, [Lies()], checked=True)
    assert "test_manager.py:" in str(caught.value)
    assert "h = x @ s.w" in str(caught.value)


@pytest.mark.parametrize(("switch", "verifies"), [("", False), ("0", False), ("1", True)])
def test_the_environment_switches_verification_on(gm, monkeypatch, switch, verifies):
    monkeypatch.setenv(VERIFY, switch)
    with pytest.raises(VerifyError) if verifies else nullcontext():
        run_passes(gm, [Lies()])
