"""Every entry of the CPU lists that may run in low precision is run in it, forward and backward."""

from dataclasses import replace

import pytest
import torch

from amp_graph.lists import load, merge

from .handwritten import rnn
from .kernels import commutation_failure, failures, first_messages, lowered, op_infos, promotion_failures

CLASSES = ("allow", "fp32_inside", "follow", "neutral")
DTYPES = ("bfloat16", "float16")

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's own notes on deprecated operators


@pytest.mark.sampled(8)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cls", CLASSES)
def test_every_entry_has_a_kernel_on_cpu(cls, dtype):
    assert failures(load("default", dtype=dtype, device="cpu"), {cls}) == {}


UNINITIALISED = {"aten.empty_like", "aten.new_empty"}


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_cast_commutes_with_what_is_neutral(dtype):
    op_list = load("default", dtype=dtype, device="cpu")
    neutral = [rule for rule in op_list if rule.cls == "neutral" and rule.op not in UNINITIALISED]
    assert not_commuting(neutral, dtype) == {}


def test_what_does_not_commute_is_found_out():
    base = load("default", dtype="bfloat16", device="cpu")
    rules = [rule for name in ("mul", "gelu", "relu") for rule in base.rules[f"aten.{name}"]]
    rules.append(replace(rules[0], op="aten.normal_"))
    assert set(not_commuting(rules, "bfloat16")) == {"aten.mul", "aten.gelu", "aten.normal_"}


def not_commuting(rules, dtype):
    return first_messages(rules, lambda rule, sample: [commutation_failure(rule, sample, getattr(torch, dtype))])


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_promotes_takes_mixed_operands(dtype):
    assert promotion_failures(load("default", dtype=dtype, device="cpu")) == {}


def test_a_broken_list_is_found_out():
    empty = replace(load("default", dtype="bfloat16", device="cpu"), rules={})
    broken = merge(empty, follow=["linalg_qr", "quantile", "gelu"], allow=["randperm", "linear"])
    found = failures(broken, {"follow", "allow"})
    assert set(found) == {"aten.linalg_qr", "aten.quantile", "aten.randperm"}
    assert found["aten.randperm"] == "no sample"


def test_a_false_promise_of_promotion_is_found_out():
    base = load("default", dtype="bfloat16", device="cpu")
    (rule,) = base.rules["aten.prelu"]
    false = replace(base, rules={"aten.prelu": (replace(rule, promotes=True),), "aten.add": base.rules["aten.add"]})
    assert set(promotion_failures(false)) == {"aten.prelu"}


@pytest.mark.parametrize("op", [pytest.param("lstm", marks=pytest.mark.onednn), "rnn_tanh", "rnn_relu"])
def test_recurrent_layers_allowed_in_bfloat16_equal_autocast(op):
    """The reason for `allow`: the very numbers that torch.autocast gives; a GRU has others."""
    args = rnn(4, is_lstm=True) if op == "lstm" else rnn(1)
    call = getattr(torch.ops.aten, op)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = call(*args)[0]
    rule = load("default", dtype="bfloat16", device="cpu").rules[f"aten.{op}"][0]
    low, _ = lowered((args, {}), rule, torch.bfloat16)
    assert rule.cls == "allow"
    torch.testing.assert_close(call(*low)[0], expected.to(torch.bfloat16), rtol=0, atol=0)


# OpInfo lists bfloat16 for these only where it sees a GPU that has it.
NEEDS_A_GPU_TO_TELL = {"aten.matmul", "aten.bmm", "aten.addbmm", "aten.baddbmm", "aten.linalg_matmul", "aten.bilinear"}


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
