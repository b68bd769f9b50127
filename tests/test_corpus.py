"""Every case of the corpus does what its tags say: the other tests build on it."""

import pytest
import torch

from tests.corpus import CASES, make, to_double
from tests.corpus.losses import float_leaves

ALL = sorted(CASES)


def step(name, seed=0, low=None, double=False):
    """One forward and backward: (model, output, loss)."""
    model, args, kwargs = make(name, seed)
    if double:
        model, args, kwargs = model.double(), to_double(args), to_double(kwargs)
    torch.manual_seed(1)
    with torch.autocast("cpu", low or torch.bfloat16, enabled=low is not None):
        out = model(*args, **kwargs)
        loss = CASES[name].loss(out)
    if "integer" not in CASES[name].tags:
        loss.backward()
    return model, out, loss


def test_the_corpus_is_large_enough():
    assert len(CASES) >= 36
    assert sum("transformers" in case.tags for case in CASES.values()) >= 12


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", ALL)
def test_a_step_has_a_finite_gradient_for_every_parameter(name):
    model, out, loss = step(name)
    assert loss.ndim == 0
    assert loss.isfinite()
    assert all(leaf.isfinite().all() for leaf in float_leaves(out))
    for parameter_name, p in model.named_parameters():
        if p.requires_grad and parameter_name not in CASES[name].without_grad:
            assert p.grad is not None, parameter_name
            assert p.grad.isfinite().all(), parameter_name
            assert p.grad.any(), f"{parameter_name}: all zero"


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", ALL)
def test_float64_agrees_with_float32_or_is_tagged(name):
    if "no_fp64" in CASES[name].tags:
        with pytest.raises((RuntimeError, ValueError, TypeError)):
            step(name, double=True)
        return
    _, _, loss = step(name)
    # The loss itself may be fp32 still: HF's losses say `logits.float()`.
    model, _, exact = step(name, double=True)
    assert all(p.dtype == torch.float64 for p in model.parameters())
    if "random" not in CASES[name].tags:
        torch.testing.assert_close(loss.double(), exact.double(), rtol=2e-5, atol=1e-6)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize(("low", "tag"), [(torch.bfloat16, "no_autocast"), (torch.float16, "no_autocast_fp16")])
def test_autocast_runs_or_is_tagged(name, low, tag):
    if tag in CASES[name].tags:
        with pytest.raises(RuntimeError):
            step(name, low=low)
        return
    model, _, loss = step(name, low=low)
    overflows = low == torch.float16 and "fp16_overflow" in CASES[name].tags
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    finite = bool(loss.isfinite()) and all(g.isfinite().all() for g in grads)
    assert finite != overflows
