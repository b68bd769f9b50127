"""Kernels of ours in steps as one graph: they are called by their operators, and train as without them."""

from functools import partial

import pytest
import torch
from torch import nn

from amp_graph.passes.backends.cuda import pad_shapes
from tests.passes.backends.cpu.convolution.test_depthwise_conv_gradients import Mixer
from tests.passes.backends.cpu.convolution.test_lower_pointwise_conv import Bottleneck, SqueezeAndExcite
from tests.passes.backends.cpu.loss.test_fuse_cross_entropy import IDS, Words, _a_machine_where_it_is_profitable  # noqa: F401
from tests.passes.backends.cuda.test_pad_shapes import Odd
from tests.passes.backends.cuda.test_pad_shapes import X as IMAGES
from tests.passes.drawn import drawn
from tests.passes.graphs import multiply_bf16
from tests.passes.whole_steps import stepped


@pytest.fixture(autouse=True)
def _is_profitable(monkeypatch):
    multiply_bf16(monkeypatch, multiplies=True)
    monkeypatch.setattr(pad_shapes, "LEAST_ALIGNED", 1)


LAYER = partial(nn.TransformerEncoderLayer, 32, 4, 64, dropout=0.0, batch_first=True)
# A model, its input, the pass, how near the losses are, how often each operator is called, and the device.
STEPS = {
    "attention": (LAYER, drawn(2, 16, 32, seed=1), "attention", 0.02, {"attention_backward": 1}),
    "depthwise": (
        Mixer, drawn(2, 3, 12, 12), "depthwise", 0.02,
        {"depthwise_weight_gradient": 1, "depthwise_input_gradient": 1},
    ),
    "pointwise": (Bottleneck, drawn(2, 16, 8, 8, seed=4), "lower_pointwise_conv", 0.02, {}),
    "pointwise, written behind": (SqueezeAndExcite, drawn(2, 16, 8, 8, seed=4), "lower_pointwise_conv", 0.02, {}),
    "cross entropy": (
        Words, IDS.clamp(min=0), "fuse_cross_entropy", 1e-4, {"cross_entropy_rows": 1, "cross_entropy_backward": 1},
    ),
    "padded": (Odd, IMAGES, "pad_shapes", 0.01, {}, ",device=cuda"),
    "gru": (partial(nn.GRU, 24, 32, 2), drawn(6, 4, 24, seed=1), "backend", 0.02, {"gru_backward": 2}),
}  # fmt: skip
CASES = [*((name, "eager") for name in STEPS), pytest.param("depthwise", "inductor", marks=pytest.mark.slow)]


def loss(out):
    first = out if isinstance(out, torch.Tensor) else out[0]
    return first.float().square().mean() if first.dim() else first


@pytest.mark.multiplied
@pytest.mark.compiled
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")  # Inductor's import
@pytest.mark.parametrize(("name", "compile"), CASES)
def test_a_step_calls_it_and_trains_as_without(name, compile):
    make, batch, word, near, calls, *device = STEPS[name]
    policies = [f"bf16{more}{''.join(device)}" for more in ("", f",skip={word}")]
    ours, plain = (stepped(make, loss, [(batch,)] * 2, policy, compile=compile) for policy in policies)
    assert {operator: ours.text.count(operator) for operator in calls} == calls
    assert not any(operator in plain.text for operator in calls)
    torch.testing.assert_close(ours.losses, plain.losses, rtol=near, atol=0)
    assert ours.losses[-1] < ours.losses[0]
