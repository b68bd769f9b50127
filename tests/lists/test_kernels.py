"""Every entry of the CPU lists that may run in low precision is run in it, forward and backward."""

from dataclasses import replace

import pytest
import torch

from amp_graph.lists import load, merge

from .kernels import failures, lowered, op_infos, promotion_failures, samples

CLASSES = ("allow", "fp32_inside", "follow", "neutral")
DTYPES = ("bfloat16", "float16")

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's own notes on deprecated operators


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cls", CLASSES)
def test_every_entry_has_a_kernel_on_cpu(cls, dtype):
    assert failures(load("default", dtype=dtype, device="cpu"), {cls}) == {}


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_promotes_takes_mixed_operands(dtype):
    assert promotion_failures(load("default", dtype=dtype, device="cpu")) == {}


def test_a_broken_list_is_found_out():
    broken = merge(load("default", dtype="bfloat16", device="cpu"), follow=["linalg_qr", "quantile"], allow=["item"])
    found = failures(broken, {"follow", "allow"})
    assert set(found) == {"aten.linalg_qr", "aten.quantile", "aten.item"}
    assert found["aten.item"] == "no sample"


def test_a_false_promise_of_promotion_is_found_out():
    base = load("default", dtype="bfloat16", device="cpu")
    (rule,) = base.rules["aten.prelu"]
    false = replace(base, rules={**base.rules, "aten.prelu": (replace(rule, promotes=True),)})
    assert set(promotion_failures(false)) == {"aten.prelu"}


def test_lowered_casts_what_inputs_names():
    rule = load("default", dtype="bfloat16", device="cpu").rules["aten.batch_norm"][0]
    args, _ = lowered(next(samples("aten.batch_norm")), rule, torch.bfloat16)
    dtypes = [arg.dtype for arg in args if isinstance(arg, torch.Tensor)]
    assert dtypes == [torch.bfloat16, *[torch.float32] * 4]


@pytest.mark.parametrize("op", ["lstm", "rnn_tanh", "rnn_relu"])
def test_recurrent_layers_allowed_in_bfloat16_equal_autocast(op):
    """The reason for `allow`: the very same numbers as torch.autocast; a GRU has others, and is not allowed."""
    from .handwritten import rnn

    args = rnn(4, is_lstm=True) if op == "lstm" else rnn(1)
    call = getattr(torch.ops.aten, op)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = call(*args)[0]
    rule = load("default", dtype="bfloat16", device="cpu").rules[f"aten.{op}"][0]
    low, _ = lowered((args, {}), rule, torch.bfloat16)
    assert rule.cls == "allow"
    torch.testing.assert_close(call(*low)[0], expected.to(torch.bfloat16), rtol=0, atol=0)


# OpInfo lists bfloat16 for these only where it sees a GPU that has it.
NEEDS_A_GPU_TO_TELL = {"aten.matmul", "aten.addbmm", "aten.baddbmm", "aten.linalg_matmul", "aten.bilinear"}


@pytest.mark.parametrize("dtype", DTYPES)
def test_cuda_lists_against_op_info(dtype):
    low = getattr(torch, dtype)
    missing = set()
    for rule in load("default", dtype=dtype, device="cuda"):
        infos = op_infos().get(rule.op.split(".")[1], ()) if rule.cls.value in CLASSES else ()
        if infos and not any(_has_cuda_kernel(info, low) for info in infos):
            missing.add(rule.op)
    assert missing - NEEDS_A_GPU_TO_TELL == set()


def _has_cuda_kernel(info, dtype):
    backward = not info.supports_autograd or dtype in info.supported_backward_dtypes("cuda")
    return dtype in info.supported_dtypes("cuda") and backward
