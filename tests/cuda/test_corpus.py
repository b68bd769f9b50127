"""On a GPU every model of the corpus is as exact as autocast there, and executes no more casts."""

import pytest
import torch

import amp_graph
from amp_graph.policy_words import DTYPES as LOW
from tests.conformance.test_accuracy import INCOMPARABLE, LOSS_SCALE, NOISY, RECURRENT, WORST, above
from tests.conformance.test_casts import LIKE, step
from tests.corpus import CASES
from tests.measure import error_ratio

DEVICE = "cuda"
COMPARABLE = sorted(name for name, case in CASES.items() if not case.tags & INCOMPARABLE)
# Autocast raises there on CUDA: it adds a sum in fp32 to zeros in low precision.
RAISES = {"gcn"}
# What is an autograd.Function of the user's runs whole, in fp32 where its backward sums.
WHOLE = {"custom_function"}
# Captured in pieces: its mask, which hides nothing, goes from one to another, where transformers 5.17 makes none for
# autocast; attention with a mask has casts of its own.
MASKED = {"wav2vec2"}
# As CUDA's autocast returns them; dispatch modes, which count here, refuse torch.cond.
COUNTABLE = sorted(
    n
    for n, c in CASES.items()
    if n not in {"cond", *RAISES, *WHOLE, *MASKED} and not c.tags & {"no_autocast", "integer"}
)


def compare(name, policy, draws, **options):
    """Assert that a converted model is as exact as autocast, or as the precision is where autocast does not have it."""
    # In bf16, too, autocast runs cuDNN's recurrent layers in fp16 (aten/src/ATen/cudnn/AutocastRNN.cpp).
    theirs = torch.float16 if name in RECURRENT else LOW[policy]
    found = error_ratio(
        name,
        lambda model: amp_graph.convert(model, policy, **options),
        lambda: torch.autocast(DEVICE, theirs, enabled=name not in RAISES),
        range(draws),
        loss_scale=LOSS_SCALE if policy == "fp16" else 1.0,
        device=DEVICE,
    )
    if name in RAISES or theirs != LOW[policy]:
        assert found.ours_output < (0.01 if policy == "bf16" else 0.002)
    else:
        assert not above({name: found}, WORST)


# Of one number's gradient, of a bias, six draws say nothing: the ratio is 1.0 to 1.5, of 200 draws 1.05.
MANY = {"gaussian_policy": 200}


@pytest.mark.parametrize("policy", LOW)
@pytest.mark.parametrize("name", COMPARABLE)
def test_as_exact_as_autocast(name, policy):
    compare(name, policy, draws=MANY.get(name, 12 if CASES[name].tags & NOISY else 6))


@pytest.mark.parametrize("policy", LOW)
@pytest.mark.parametrize("name", ["gpt2", "resnet_bottleneck", "lstm_lm"])
def test_as_exact_as_autocast_through_inductor(name, policy):
    compare(name, policy, draws=2, compile="inductor")


@pytest.mark.parametrize("name", COUNTABLE)
def test_never_more_casts_than_autocast(name):
    (ours, _), (theirs, _) = (step(CASES[name], how, False, DEVICE) for how in (LIKE, None))
    assert ours.total <= theirs.total, f"ours:\n{ours.table()}\nautocast:\n{theirs.table()}"
