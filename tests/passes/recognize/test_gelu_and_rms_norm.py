"""GELUs and RMS norms written out in Python become the one call; what only looks like one stays."""

import math

import pytest
import torch

import amp_graph
from amp_graph.capture.conversion import conversion_of
from amp_graph.passes.graph.identify_ops import IdentifyOps
from amp_graph.passes.manager import run_passes
from amp_graph.passes.recognize.gelu import FuseGelu
from amp_graph.passes.recognize.rms_norm import FuseRmsNorm
from tests.corpus import make
from tests.corpus.transformers_models import LAYERS
from tests.passes.graphs import assert_near, capture_function, run_step, standard_passes

TANH = math.sqrt(2 / math.pi)
X = torch.linspace(-6, 6, 600).view(5, 15, 8)
STATE = {
    "w": torch.rand(8, generator=torch.Generator().manual_seed(1)) + 0.5,
    "v": torch.rand(15, 1, generator=torch.Generator().manual_seed(2)),
}
EPS = 1e-3  # large enough to be seen

GELUS = {
    "gpt2": ("tanh", lambda s, x: 0.5 * x * (1.0 + torch.tanh(TANH * (x + 0.044715 * torch.pow(x, 3.0))))),
    "fast": ("tanh", lambda s, x: 0.5 * x * (1.0 + torch.tanh(x * 0.7978845608 * (1.0 + 0.044715 * x * x)))),
    "half behind": ("tanh", lambda s, x: x * (1 + torch.tanh(TANH * (x + 0.044715 * x**3))) / 2),
    "distribution": ("tanh", lambda s, x: x * (0.5 * (1 + (TANH * x * (0.044715 * x**2 + 1)).tanh()))),
    "erf": ("none", lambda s, x: x * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0)))),
    "erf behind": ("none", lambda s, x: 0.5 * (x * (torch.special.erf(x * 0.5**0.5) + 1))),
    "a scaled argument": ("none", lambda s, x: (h := x * 2 + 1) * 0.5 * (1.0 + torch.erf(h / math.sqrt(2.0)))),
    "a doubled argument": ("none", lambda s, x: (h := x * 2) * 0.5 * (1.0 + torch.erf(h / math.sqrt(2.0)))),
}


def llama(s, x):
    h = x.to(torch.float32)
    h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + EPS)
    return s.w * h.to(x.dtype)


def gemma(s, x):
    h = x.float()
    h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + EPS)
    return (h * (1.0 + s.w.float())).type_as(x)


NORMS = {
    "llama": (llama, True),
    "t5": (lambda s, x: s.w * (x * torch.rsqrt(x.to(torch.float32).pow(2).mean(-1, keepdim=True) + EPS)), True),
    "gemma": (gemma, True),
    "squares": (lambda s, x: x * torch.rsqrt(torch.mean(x * x, dim=2, keepdim=True) + EPS) * s.w, True),
    "root": (lambda s, x: x / torch.sqrt(x.square().mean((-1,), True) + EPS) * s.w, True),
    "power": (lambda s, x: (EPS + (x**2).mean(dim=-1, keepdim=True)) ** -0.5 * x * s.w, True),
    "no weight": (lambda s, x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS), False),
    "a weight a place": (lambda s, x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS) * s.v, False),
    "norm read twice": (lambda s, x: (h := x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS)) * s.w + h, False),
}


def gelu_across_grad_modes(s, x):
    with torch.no_grad():
        inner = torch.erf(x / math.sqrt(2.0))
    return x * 0.5 * (1.0 + inner)


def gelu_written_half_way(s, x):
    h = x * 1
    inner = torch.erf(h / 2**0.5)
    h += 1
    return h * 0.5 * (1.0 + inner)


NO_GELUS = {
    "an inner value is read": lambda s, x: (x * (cdf := 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0)))), cdf),
    "across grad modes": gelu_across_grad_modes,
    "written half-way": gelu_written_half_way,
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


def written_half_way(s, x):
    h = x * 1
    scale = torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + EPS)
    h += 1
    return h * scale


def across_grad_modes(s, x):
    with torch.no_grad():
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS)
    return x * scale * s.w


NO_NORMS = {
    "across grad modes": across_grad_modes,
    "another x": lambda s, x: x.sin() * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS),
    "a cube": lambda s, x: x * torch.rsqrt(x.pow(3).abs().mean(-1, keepdim=True) + EPS),
    "power of three": lambda s, x: x * torch.rsqrt(x.pow(4).mean(-1, keepdim=True) + EPS),
    "product of two": lambda s, x: x * torch.rsqrt((x * x.abs()).abs().mean(-1, keepdim=True) + EPS),
    "all places": lambda s, x: x * torch.rsqrt(x.pow(2).mean((-2, -1), keepdim=True) + EPS),
    "another place": lambda s, x: x * torch.rsqrt(x.pow(2).mean(1, keepdim=True) + EPS),
    "no eps": lambda s, x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True)),
    "eps that is learnt": lambda s, x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + s.v),
    "divided": lambda s, x: x / torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS),
    "multiplied": lambda s, x: x * torch.sqrt(x.pow(2).mean(-1, keepdim=True) + EPS),
    "turned over": lambda s, x: torch.sqrt(x.pow(2).mean(-1, keepdim=True) + EPS) / x,
    "another power": lambda s, x: x * (x.pow(2).mean(-1, keepdim=True) + EPS) ** -0.25,
    "twice": lambda s, x: x * torch.rsqrt(torch.add(x.pow(2).mean(-1, keepdim=True), EPS, alpha=2)),
    "mean that is read": lambda s, x: x * torch.rsqrt((m := x.pow(2).mean(-1, keepdim=True)) + EPS) + m,
    "a real conversion": lambda s, x: x * torch.rsqrt(x.double().pow(2).mean(-1, keepdim=True) + EPS).float(),
    "written half-way": written_half_way,
}


def fused(function, one, target):
    graph = capture_function(function, X.clone().requires_grad_(), **STATE)
    gm = graph.fresh()
    run_passes(gm, [IdentifyOps(), one], checked=True)
    return graph, gm, [n for n in gm.graph.nodes if getattr(n.target, "__name__", "") == target]


def left(gm):
    """What a formula was written with."""
    names = [getattr(n.target, "__name__", n.target) for n in gm.graph.nodes]
    return [name for name in names if name in {"tanh", "erf", "rsqrt", "sqrt", "mean"}]


@pytest.mark.parametrize("name", GELUS)
def test_every_way_of_writing_a_gelu(name):
    approximate, function = GELUS[name]
    graph, gm, (gelu,) = fused(function, FuseGelu(), "gelu")
    assert gelu.kwargs == {"approximate": approximate}
    assert not left(gm)
    plain, ours = run_step(graph.gm, graph.given), run_step(gm, graph.given)
    torch.testing.assert_close(ours.outputs[0], plain.outputs[0], rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("name", NORMS)
def test_every_way_of_writing_a_norm(name):
    function, weighted = NORMS[name]
    graph, gm, (norm,) = fused(function, FuseRmsNorm(), "rms_norm")
    assert (norm.args[1], norm.args[2] is not None, norm.args[3]) == ((8,), weighted, EPS)
    assert not left(gm)
    plain, ours = run_step(graph.gm, graph.given), run_step(gm, graph.given)
    assert_near(ours, plain, 1e-5)
    assert torch.equal(ours.outputs[0], plain.outputs[0]) or function is not llama, "in fp32 every bit of it stays"


@pytest.mark.parametrize(
    ("function", "one", "target"),
    [
        *((f, FuseGelu(), "gelu") for f in NO_GELUS.values()),
        *((f, FuseRmsNorm(), "rms_norm") for f in NO_NORMS.values()),
    ],
    ids=[*NO_GELUS, *(f"{name}, no norm" for name in NO_NORMS)],
)
def test_what_is_something_else_stays(function, one, target):
    _, gm, found = fused(function, one, target)
    assert not found
    run_passes(gm, standard_passes(), checked=True)


def test_gpt2_calls_one_gelu_a_layer():
    model, args, kwargs = make("gpt2")
    amp_graph.convert(model, "bf16")(*args, **kwargs)
    (graph,) = conversion_of(model).graphs
    assert len([n for n in graph.rewritten.gm.graph.nodes if "gelu" in str(n.target)]) == LAYERS
