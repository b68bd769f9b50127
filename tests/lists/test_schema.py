"""Looking a call up, and the conditions on its arguments."""

import pytest
import torch

from amp_graph.lists import OpClass, OpList, Rule, load

aten = torch.ops.aten


def rule(op="aten.gelu", cls="deny", **fields):
    return Rule(op, OpClass(cls), "test", **fields)


def op_list(*rules):
    keys = dict.fromkeys(r.op for r in rules)
    return OpList("t", "bfloat16", "cpu", "opaque", {k: tuple(r for r in rules if r.op == k) for k in keys})


def test_overload_before_packet_before_functional():
    found = op_list(rule("aten.add"), rule("aten.add.Scalar", "allow"), rule("aten.mul_", "neutral"), rule("aten.mul"),
                    rule("aten.__and__"))  # fmt: skip
    assert found.lookup(aten.add.Tensor, {}).cls == "deny"
    assert found.lookup(aten.add.Scalar, {}).cls == "allow"
    assert found.lookup(aten.add_.Scalar, {}).cls == "deny"
    assert found.lookup(aten.add.out, {}).cls == "deny"
    assert found.lookup(aten.mul_.Tensor, {}).cls == "neutral"
    assert found.lookup(aten.__iand__.Scalar, {}).cls == "deny"
    assert found.lookup(aten.sub.Tensor, {}) is None


def test_a_condition_that_fails_goes_on_to_the_packet():
    found = op_list(rule("aten.gelu.default", "allow", when=(("approximate", "tanh"),)), rule("aten.gelu"))
    assert found.lookup(aten.gelu.default, {"approximate": "tanh"}).cls == "allow"
    assert found.lookup(aten.gelu.default, {"approximate": "none"}).cls == "deny"


@pytest.mark.parametrize(
    ("condition", "value", "holds"),
    [
        ("tanh", "tanh", True),
        ("tanh", "none", False),
        (True, True, True),
        (True, 1, False),
        (1, True, False),
        ((1, 2), 2.0, True),
        ((1, 2), 3, False),
        ((None, "a"), None, True),
        (1, torch.ones(()), False),
        ("a", None, False),
    ],
)
def test_conditions(condition, value, holds):
    assert rule(when=(("x", condition),)).matches({"x": value}) is holds


def test_an_argument_not_given_counts_as_none():
    assert rule(when=(("dtype", None),)).matches({})
    assert not rule(when=(("dtype", 1),)).matches({})


@pytest.mark.parametrize(
    ("dtype", "exponent", "cls"),
    [
        ("bfloat16", 3, "follow"),
        ("bfloat16", 2.0, "follow"),
        ("bfloat16", -1, "fp32_inside"),
        ("bfloat16", 0.5, "fp32_inside"),
        ("bfloat16", torch.ones(()), "fp32_inside"),
        ("float16", 3, "deny"),
    ],
)
def test_whole_powers(dtype, exponent, cls):
    found = load("default", dtype=dtype, device="cpu").lookup(aten.pow.Tensor_Scalar, {"exponent": exponent})
    assert found.cls == cls
