"""Every model of the corpus converts and trains under every policy, with the graph contract verified."""

import functools
from importlib.metadata import version
from importlib.util import find_spec

import pytest
import torch

import amp_graph
from amp_graph.capture.conversion import conversion_of
from tests.corpus import CASES, make
from tests.passes.graphs import Function

POLICIES = ("bf16", "bf16,accuracy=fast", "fp16")
LOSS_SCALE = 1024.0
OLDER = find_spec("transformers") is not None and tuple(map(int, version("transformers").split(".")[:2])) < (5, 23)
# Operations on floats that no list names, by design.
UNLISTED = {"transformers.grouped_mm_fallback"}  # a custom operator of that package


@pytest.fixture(autouse=True)
def _verified(monkeypatch):
    monkeypatch.setenv("AMP_GRAPH_VERIFY", "1")


@functools.cache
def with_gradient(name):
    """Parameters that a step in fp32 gives a gradient."""
    model, args, kwargs = make(name)
    loss = CASES[name].loss(model(*args, **kwargs))
    if loss.requires_grad:
        loss.backward()
    return {n for n, p in model.named_parameters() if p.grad is not None}


# Models of which a part runs as written, under autocast, and whose reports say so: a loop over experts that were hit;
# before transformers 5.23 (5.20.2 is the last for Python 3.10) Whisper asks of each layer whether a random tensor is
# less than `layerdrop`, which is 0.
ESCAPES = {"mixtral_eager"} | ({"whisper"} if OLDER else set())


@pytest.mark.sampled(20)
@pytest.mark.parametrize("policy", [pytest.param(p, marks=pytest.mark.slow) if "fast" in p else p for p in POLICIES])
@pytest.mark.parametrize("name", sorted(CASES))
def test_three_training_steps(name, policy):
    case = CASES[name]
    model, *_ = make(name)
    amp_graph.convert(model, policy)
    scale = LOSS_SCALE if policy.startswith("fp16") else 1.0
    optimizer = torch.optim.SGD(model.parameters(), 1e-3) if [*model.parameters()] else None
    expected = with_gradient(name)
    for _ in range(3):
        _, args, kwargs = make(name)  # a model may write into its inputs
        model.zero_grad()
        loss = case.loss(model(*args, **kwargs))
        assert loss.isfinite()
        if loss.requires_grad:
            (loss * scale).backward()
        for p in model.parameters():
            if p.grad is not None:
                p.grad /= scale
        missing = expected - {n for n, p in model.named_parameters() if p.grad is not None}
        assert not missing, "no gradient"
        bad = [n for n, p in model.named_parameters() if p.grad is not None and not p.grad.isfinite().all()]
        assert not bad, "not finite"
        if optimizer:
            optimizer.step()
    assert conversion_of(model).runs >= 3
    assert any("only a part" in note for note in amp_graph.report(model).notes) == (name in ESCAPES)
    assert unlisted(model) <= UNLISTED


def unlisted(model):
    """Operations that compute on floats and that no list names."""
    found = set()
    for graph in amp_graph.report(model).graphs:
        for node in graph.operations:
            if not node.listed and node.precision:
                found |= {*node.ops} or {node.name}
    return found


def test_control_an_unlisted_operation_is_found():
    model = amp_graph.convert(Function(lambda self, x: torch.special.bessel_j0(x) + 1))
    model(torch.randn(3))
    assert unlisted(model) == {"aten.special_bessel_j0"}
