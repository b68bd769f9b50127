"""GELU written out in Python becomes the one call; what only looks like it stays."""

import math

import pytest
import torch

import amp_graph
from amp_graph.capture.conversion import conversion_of
from amp_graph.passes.graph.identify_ops import IdentifyOps
from amp_graph.passes.manager import run_passes
from amp_graph.passes.recognize.gelu import FuseGelu
from tests.conformance.test_casts import DEEP, LAYERS
from tests.corpus import make
from tests.passes.graphs import capture_function, run_step, standard_passes

TANH = math.sqrt(2 / math.pi)
X = torch.linspace(-6, 6, 600).view(20, 30)

FORMS = {
    "gpt2": ("tanh", lambda s, x: 0.5 * x * (1.0 + torch.tanh(TANH * (x + 0.044715 * torch.pow(x, 3.0))))),
    "fast": ("tanh", lambda s, x: 0.5 * x * (1.0 + torch.tanh(x * 0.7978845608 * (1.0 + 0.044715 * x * x)))),
    "half behind": ("tanh", lambda s, x: x * (1 + torch.tanh(TANH * (x + 0.044715 * x**3))) / 2),
    "distribution": ("tanh", lambda s, x: x * (0.5 * (1 + (TANH * x * (0.044715 * x**2 + 1)).tanh()))),
    "erf": ("none", lambda s, x: x * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0)))),
    "erf behind": ("none", lambda s, x: 0.5 * (x * (torch.special.erf(x * 0.5**0.5) + 1))),
    "a scaled argument": ("none", lambda s, x: (h := x * 2 + 1) * 0.5 * (1.0 + torch.erf(h / math.sqrt(2.0)))),
    "a doubled argument": ("none", lambda s, x: (h := x * 2) * 0.5 * (1.0 + torch.erf(h / math.sqrt(2.0)))),
}


def across_grad_modes(s, x):
    with torch.no_grad():
        inner = torch.erf(x / math.sqrt(2.0))
    return x * 0.5 * (1.0 + inner)


def written_half_way(s, x):
    h = x * 1
    inner = torch.erf(h / 2**0.5)
    h += 1
    return h * 0.5 * (1.0 + inner)


OTHERS = {
    "an inner value is read": lambda s, x: (x * (cdf := 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0)))), cdf),
    "across grad modes": across_grad_modes,
    "written half-way": written_half_way,
    "another slope": lambda s, x: 0.5 * x * (1.0 + torch.tanh(0.8 * (x + 0.044715 * torch.pow(x, 3.0)))),
    "another cubic": lambda s, x: 0.5 * x * (1.0 + torch.tanh(TANH * (x + 0.0447 * torch.pow(x, 3.0)))),
    "no half": lambda s, x: x * (1.0 + torch.erf(x / math.sqrt(2.0))),
    "another factor": lambda s, x: 0.5 * x.sin() * (1.0 + torch.erf(x / math.sqrt(2.0))),
    "minus": lambda s, x: 0.5 * x * (1.0 - torch.erf(x / math.sqrt(2.0))),
    "alpha": lambda s, x: 0.5 * x * torch.add(torch.erf(x / math.sqrt(2.0)), 1.0, alpha=2),
    "square": lambda s, x: 0.5 * x * (1.0 + torch.tanh(TANH * (x + 0.044715 * torch.pow(x, 2.0)))),
    "a tensor": lambda s, x: 0.5 * x * (s.w + torch.erf(x / math.sqrt(2.0))),
    "tanh of a tensor": lambda s, x: torch.tanh(x) * s.w,
}


def fused(function, x=X, **state):
    graph = capture_function(function, x, **state)
    gm = graph.fresh()
    run_passes(gm, [IdentifyOps(), FuseGelu()], checked=True)
    return graph, gm, [n for n in gm.graph.nodes if getattr(n.target, "__name__", "") == "gelu"]


@pytest.mark.parametrize("name", FORMS)
def test_every_way_of_writing_it(name):
    approximate, function = FORMS[name]
    graph, gm, (gelu,) = fused(function, X.clone().requires_grad_())
    assert gelu.kwargs == {"approximate": approximate}
    assert not [n for n in gm.graph.nodes if getattr(n.target, "__name__", "") in {"tanh", "erf"}]
    plain, ours = run_step(graph.gm, graph.given), run_step(gm, graph.given)
    torch.testing.assert_close(ours.outputs[0], plain.outputs[0], rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_something_else_stays(name):
    _, gm, found = fused(OTHERS[name], w=torch.rand(20, 30))
    assert not found
    run_passes(gm, standard_passes(), checked=True)


def test_gpt2_calls_one_gelu_a_layer():
    model, args, kwargs = make(DEEP["gpt2"])
    amp_graph.convert(model, "bf16")(*args, **kwargs)
    (graph,) = conversion_of(model).graphs
    assert len([n for n in graph.rewritten.gm.graph.nodes if "gelu" in str(n.target)]) == LAYERS
