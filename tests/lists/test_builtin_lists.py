"""What every built-in list must hold, and how ours relate to torch.autocast's."""

import re

import pytest
import torch

from amp_graph.lists import builtin_names, load
from amp_graph.lists.load import find, read
from amp_graph.lists.operators import check_rules

OF_OTHERS = {"transformers.grouped_mm_fallback"}  # of a library that may not be imported
DEFAULTS = [(dtype, device) for dtype in ("bfloat16", "float16") for device in ("cpu", "cuda")]


@pytest.mark.parametrize("name", builtin_names())
def test_every_entry_is_of_an_existing_operator_and_says_why(name):
    rules = read(find(name)).rules
    check_rules([rule for rule in rules if rule.op not in OF_OTHERS])
    for rule in rules:
        assert len(rule.why) > 15, rule.origin
        assert re.fullmatch(rf"{name}\.toml:\d+", rule.origin)
        assert rule.op.startswith("aten.") or rule.op in OF_OTHERS


@pytest.mark.parametrize("name", builtin_names())
def test_origins_point_at_the_line_of_the_operator(name):
    lines = find(name).read_text().splitlines()
    assert all(f'"{rule.op}"' in lines[int(rule.origin.rsplit(":", 1)[1]) - 1] for rule in read(find(name)).rules)


@pytest.mark.parametrize(("dtype", "device"), DEFAULTS)
def test_one_class_for_an_operator(dtype, device):
    op_list = load("default", dtype=dtype, device=device)
    assert (op_list.dtype, op_list.device, op_list.unlisted) == (dtype, device, "opaque")
    assert len(op_list) > 500
    for key, rules in op_list.rules.items():
        assert {rule.op for rule in rules} <= {key, ".".join(key.split(".")[:2])}
        assert [bool(rule.when) for rule in rules] == sorted((bool(rule.when) for rule in rules), reverse=True)
        assert sum(not rule.when for rule in rules) <= 1
        assert len({rule.when for rule in rules}) == len(rules)


def ours_for(autocast_rule, op_list):
    _, packet, overload = autocast_rule.op.split(".")
    return op_list.lookup(getattr(getattr(torch.ops.aten, packet), overload), {"mode": "constant", "exponent": 3})


# Where ours runs low what autocast runs in float32, because the kernel itself is float32 inside.
FP32_INSIDE = {"rms_norm", "softmax"}
# Kernels of CUDA that take activations and parameters in one dtype only.
ALIKE_ON_CUDA = {"layer_norm", "group_norm", "rms_norm"}
# A small whole power cannot overflow bfloat16; in float32 it pulls the MLP of a tanh-GELU after it.
WHOLE_POWERS = {("pow", "follow")}


@pytest.mark.parametrize(("dtype", "device"), DEFAULTS)
def test_never_lower_than_autocast(dtype, device):
    """Every operator that autocast keeps full precision is full, or opaque, or float32 inside, in ours."""
    ours = load("default", dtype=dtype, device=device)
    lower, theirs = set(), load(f"autocast_{device}", dtype=dtype, device=device)
    for rule in theirs:
        mine = ours_for(rule, ours)
        if rule.cls == "deny" and mine is not None and mine.cls not in ("deny", "opaque"):
            lower.add((rule.op.split(".")[1], mine.cls.value))
    listed = {rule.op.split(".")[1] for rule in theirs}  # rms_norm, since 2.12
    known = {(op, "fp32_inside") for op in FP32_INSIDE & listed} | (WHOLE_POWERS if dtype == "bfloat16" else set())
    assert lower == (known if device == "cuda" else set())


# Allowed in ours and not in autocast's table: they become matrix products there.
MATRIX_PRODUCTS = {
    "aten.einsum",
    "aten.tensordot",
    "aten.inner",
    "aten.chain_matmul",
    "aten.linalg_multi_dot",
    "aten.linalg_matmul",
    "transformers.grouped_mm_fallback",
}
RECURRENT = {
    f"aten.{name}" for name in ("lstm", "gru", "gru.input", "rnn_tanh", "rnn_relu", "rnn_tanh_cell", "rnn_relu_cell")
}
CONVOLUTIONS = {"aten.convolution", "aten._convolution", "aten._convolution_mode"}
CUDA_KERNELS = {"aten._cudnn_rnn"} | {f"aten._scaled_dot_product_{name}_attention" for name in ("efficient", "cudnn")}


@pytest.mark.parametrize(("dtype", "device"), DEFAULTS)
def test_allows_what_autocast_lowers_and_no_more(dtype, device):
    ours = load("default", dtype=dtype, device=device)
    lowered = {
        r.op.rsplit(".", 1)[0] for r in load(f"autocast_{device}", dtype=dtype, device=device) if r.cls == "allow"
    }
    allowed = {rule.op for rule in ours if rule.cls == "allow"}
    more = allowed - lowered
    assert more <= MATRIX_PRODUCTS | RECURRENT | CONVOLUTIONS | CUDA_KERNELS
    assert not (device == "cpu" and dtype == "float16" and more & RECURRENT)
    fewer = {
        "aten.prelu",
        "aten._native_multi_head_attention",
        "aten._addmm_activation",
        "aten.mkldnn_rnn_layer",
    }
    assert lowered - allowed <= fewer


@pytest.mark.parametrize("op", ["layer_norm", "batch_norm", "group_norm", "instance_norm", "rms_norm"])
@pytest.mark.parametrize(("dtype", "device"), DEFAULTS)
def test_norms_lower_only_their_input(op, dtype, device):
    *without_weight, rule = load("default", dtype=dtype, device=device).rules[f"aten.{op}"]
    assert bool(without_weight) == ((op, device) == ("rms_norm", "cuda"))
    full = device == "cuda" and op in ALIKE_ON_CUDA
    assert (rule.cls.value, rule.inputs) == (("deny", None) if full else ("fp32_inside", ("input",)))


def test_no_stray_toml():
    ours = {"common", "bf16", "cpu", "cuda", "bf16_cpu", "bf16_cuda", "fp16_cpu", "fp16_cuda", "fast_cuda"}
    assert set(builtin_names()) == {*ours, "autocast_cpu", "autocast_cuda"}


def test_the_package_exports_what_it_says():
    import amp_graph.lists as package

    assert all(hasattr(package, name) for name in package.__all__)
    assert package.__all__ == sorted(package.__all__)
