"""The core is a compiler by itself: it imports no backend, and is as exact as autocast with every backend pass off."""

import contextlib
import subprocess
import sys

import pytest
import torch

import amp_graph
from amp_graph.capture.conversion import conversion_of
from tests.backend_modules import CORE, is_of_backend
from tests.corpus import CASES, to_double
from tests.measure import error_ratio, output_error, run

BF16 = torch.bfloat16
POLICY = "bf16,skip=backend"
INCOMPARABLE = {"no_fp64", "random", "integer", "no_autocast"}
NOISY = {"kinks", "discontinuous", "moe"}
WORST = 1.15

ALONE = """
import importlib, sys, torch
from torch import nn

class Refuses:
    def find_spec(self, name, path=None, target=None):
        if name.startswith("amp_graph.passes.backends"):
            raise ImportError(f"{name} belongs to a backend")

sys.meta_path.insert(0, Refuses())
for name in sys.argv[1].split():
    importlib.import_module(name)
try:
    importlib.import_module("amp_graph.passes.backends.cpu.norm.batch_norm_functions")
except ImportError as error:  # control: what the core does not import is refused
    assert "belongs to a backend" in str(error)
else:
    raise AssertionError("a backend can be imported")
"""
# The passes of the core alone over a graph that no capture of ours made.
REWRITES = """
from amp_graph.lists import effective
from amp_graph.passes.casts.eliminate_casts import EliminateCasts
from amp_graph.passes.graph.identify_ops import IdentifyOps
from amp_graph.passes.graph.propagate_fake_values import inline_modules
from amp_graph.passes.casts.insert_casts import InsertCasts
from amp_graph.passes.manager import run_passes
from amp_graph.passes.graph.fake_values import adopt_values
from amp_graph.passes.precision.plan_precision import PlanPrecision
from amp_graph.passes.graph.propagate_fake_values import record_values
from amp_graph.passes.memory.recompute_activations import RecomputeActivations
from amp_graph.passes.pipeline_options import PipelineOptions
from amp_graph.passes.casts.share_casts import ShareCasts

low, x = torch.bfloat16, torch.randn(64, 32)
model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 8))
with torch.autocast("cpu", low):
    theirs = model(x).float()
gm = inline_modules(torch.fx.symbolic_trace(model))
record_values(gm, [x])
adopt_values(gm)
options = PipelineOptions(effective((), dtype="bfloat16", device="cpu"), low, recompute="all")
done = run_passes(gm, [
    IdentifyOps(), PlanPrecision(options), InsertCasts(options), EliminateCasts(), ShareCasts(options),
    RecomputeActivations(options),
], checked=True)
assert any("cast" in change.action for one in done for change in one.result.changes), done
torch.testing.assert_close(gm(x).float(), theirs, atol=2e-2, rtol=2e-2)
gm(x).sum().backward()
assert all(p.grad is not None for p in model.parameters())
"""


def test_the_core_is_imported_and_rewrites_where_no_backend_can_be():
    assert len(CORE) > 80
    done = subprocess.run(
        [sys.executable, "-c", ALONE + REWRITES, " ".join(CORE)], capture_output=True, text=True, check=False
    )
    assert not done.returncode, done.stderr[-2000:]


def converted(model):
    return amp_graph.convert(model, POLICY)


def backend_calls(model):
    """The functions of backends that graphs of a converted model call."""
    nodes = [n for graph in conversion_of(model).graphs for n in graph.rewritten.gm.graph.nodes]
    return {n.target for n in nodes if n.op == "call_function" and is_of_backend(n.target)}


def errors_of_inference(name):
    """Errors of outputs, without gradients: ours, and those of autocast."""

    def still(double):
        return lambda model: (model.double() if double else model).eval()

    ref = run(name, 0, still(True), torch.no_grad, inputs=to_double)
    theirs = run(name, 0, still(False), lambda: _both(torch.no_grad(), torch.autocast("cpu", BF16)))
    ours = run(name, 0, lambda model: converted(model.eval()), torch.no_grad)
    return output_error(ours, ref), output_error(theirs, ref)


@contextlib.contextmanager
def _both(one, other):
    with one, other:
        yield


COMPARED = sorted(name for name, case in CASES.items() if not case.tags & INCOMPARABLE)


@pytest.mark.sampled(50)
@pytest.mark.filterwarnings("ignore:amp_graph. MixtralForCausalLM. only a part:amp_graph.errors.AmpGraphWarning")
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True:UserWarning")  # a checkpoint's
@pytest.mark.parametrize("name", COMPARED)
def test_a_model_trains_and_infers_as_exactly_as_with_autocast(name):
    seeds = range(9 if CASES[name].tags & NOISY else 2)
    models = []
    found = error_ratio(
        name, lambda m: models.append(converted(m)) or models[-1], lambda: torch.autocast("cpu", BF16), seeds
    )
    assert not set().union(*map(backend_calls, models))
    assert found.output <= WORST, found
    assert found.gradient_worst <= WORST, found
    ours, theirs = errors_of_inference(name)
    assert ours <= max(1.5 * theirs, 1e-6), (ours, theirs)
