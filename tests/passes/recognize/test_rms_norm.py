"""RMS norms written out in Python become the one call; what only looks like one stays."""

import pytest
import torch
import torch.nn.functional as F

from amp_graph.passes.graph.identify_ops import IdentifyOps
from amp_graph.passes.manager import run_passes
from amp_graph.passes.recognize.rms_norm import FuseRmsNorm
from tests.passes.graphs import assert_near, capture_function, run_step, standard_passes

X = torch.randn(3, 5, 8, generator=torch.Generator().manual_seed(0))
WEIGHT = torch.rand(8, generator=torch.Generator().manual_seed(1)) + 0.5
EPS = 1e-3  # large enough to be seen


def llama(s, x):
    h = x.to(torch.float32)
    h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + EPS)
    return s.w * h.to(x.dtype)


def gemma(s, x):
    h = x.float()
    h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + EPS)
    return (h * (1.0 + s.w.float())).type_as(x)


FORMS = {
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


def written_half_way(s, x):
    h = x * 1
    scale = torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + EPS)
    h += 1
    return h * scale


def across_grad_modes(s, x):
    with torch.no_grad():
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS)
    return x * scale * s.w


OTHERS = {
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


def fused(function, x=X):
    graph = capture_function(function, x, w=WEIGHT, v=torch.rand(5, 1))
    gm = graph.fresh()
    run_passes(gm, [IdentifyOps(), FuseRmsNorm()], checked=True)
    return graph, gm, [n for n in gm.graph.nodes if n.target is F.rms_norm]


@pytest.mark.parametrize("name", FORMS)
def test_every_way_of_writing_it(name):
    function, weighted = FORMS[name]
    graph, gm, (norm,) = fused(function, X.clone().requires_grad_())
    assert (norm.args[1], norm.args[2] is not None, norm.args[3]) == ((8,), weighted, EPS)
    assert not [n for n in gm.graph.nodes if getattr(n.target, "__name__", n.target) in {"rsqrt", "sqrt", "mean"}]
    plain, ours = run_step(graph.gm, graph.given), run_step(gm, graph.given)
    assert_near(ours, plain, 1e-5)
    assert torch.equal(ours.outputs[0], plain.outputs[0]) or function is not llama, "in fp32 every bit of it stays"


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_something_else_stays(name):
    _, gm, found = fused(OTHERS[name])
    assert not found
    run_passes(gm, standard_passes(), checked=True)
