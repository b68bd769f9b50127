"""The autocast lists are PyTorch's own tables, entry by entry, as the torch at hand has them."""

import pytest
import torch

from amp_graph.lists import load
from amp_graph.lists.load import _parsed

KEYS = {"autocast_cuda": "AutocastCUDA", "autocast_cpu": "AutocastCPU"}
COUNTS = {
    "autocast_cuda": {
        "lower_precision_fp": 36,
        "fp32": 59,
        "fp32_set_opt_dtype": 11,
        "fp32_append_dtype": 2,
        "promote": 11,
        "banned": 1,
    },
    "autocast_cpu": {"lower_precision_fp": 24, "fp32": 100, "promote": 3},
}
CLASSES = {"lower_precision_fp": "allow", "promote": "promote"}


# Registered by builds of torch that have CUDA, and by no other.
ONLY_IN_CUDA_BUILDS = set() if torch.version.cuda else {"aten._cudnn_rnn.default"}


def dispatcher_table(key):
    names = [name for name in torch._C._dispatch_get_all_op_names() if not name.startswith("audit_tests::")]
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    table = {name.replace("::", ".") for name in names if has(name, key)}
    return {name if name.count(".") == 2 else f"{name}.default" for name in table}


def difference(rules, key):
    table = dispatcher_table(key)
    return {"extra": set(rules) - table, "missing": table - set(rules)}


@pytest.mark.parametrize("name", KEYS)
def test_same_entries_as_the_dispatcher(name):
    rules = load(name, dtype="bfloat16", device="cpu").rules
    builds = ONLY_IN_CUDA_BUILDS if name == "autocast_cuda" else set()
    assert difference(rules, KEYS[name]) == {"extra": builds, "missing": set()}


def test_a_dropped_or_added_entry_is_found():
    rules = dict(load("autocast_cpu", dtype="bfloat16", device="cpu").rules)
    rules["aten.relu.default"] = rules.pop("aten.linear.default")
    found = difference(rules, "AutocastCPU")
    assert found == {"extra": {"aten.relu.default"}, "missing": {"aten.linear.default"}}


@pytest.mark.skipif(not torch.__version__.startswith("2.13"), reason="counted on torch 2.13")
@pytest.mark.parametrize("name", KEYS)
def test_policies_have_their_counts(name):
    policies = [rule.policy for rule in load(name, dtype="bfloat16", device="cpu")]
    assert {policy: policies.count(policy) for policy in set(policies)} == COUNTS[name]


@pytest.mark.parametrize("name", KEYS)
def test_policy_and_class_agree(name):
    op_list = load(name, dtype="float16", device="cuda")
    assert op_list.unlisted == "native"
    assert all(rule.cls == CLASSES.get(rule.policy, "deny") for rule in op_list)


def _unary(op):
    return getattr(torch.ops.aten, op.split(".")[1]).default


@pytest.mark.parametrize("policy", ["lower_precision_fp", "fp32"])
def test_classes_match_what_autocast_does(policy):
    """Run what can be run on CPU with one or two square matrices, and look at the dtype that comes out."""
    seen = 0
    for rule in load("autocast_cpu", dtype="bfloat16", device="cpu"):
        overload = rule.op.rsplit(".", 1)[1]
        if rule.policy != policy or overload != "default":
            continue
        given = torch.float32 if policy == "lower_precision_fp" else torch.bfloat16
        matrix = (torch.eye(4) + 0.1).to(given)
        required = [a for a in _unary(rule.op)._schema.arguments if not a.has_default_value()]
        if not all(str(a.type) == "Tensor" for a in required):
            continue
        try:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                result = _unary(rule.op)(*[matrix] * len(required))
        except (RuntimeError, IndexError, ValueError):
            continue
        results = result if isinstance(result, (tuple, list)) else (result,)
        if results[0].is_floating_point():
            seen += 1
            wanted = torch.bfloat16 if policy == "lower_precision_fp" else torch.float32
            assert results[0].dtype == wanted, rule.op
    assert seen >= 5


@pytest.mark.parametrize(
    ("version", "since", "until"),
    [("2.11.0", False, True), ("2.12.1+cu130", True, True), ("2.13.0", True, False), ("3.0", True, False)],
)
def test_since_and_until_are_honoured(monkeypatch, version, since, until):
    monkeypatch.setattr(torch, "__version__", version)
    _parsed.cache_clear()
    rules = load("autocast_cuda", dtype="float16", device="cuda").rules
    _parsed.cache_clear()
    assert ("aten.rms_norm.default" in rules) is since
    assert ("aten.cumsum.dimname" in rules) is until


def test_a_named_dtype_is_obeyed():
    """fp32_set_opt_dtype steps back where the call says which dtype it wants, as autocast does."""
    op_list = load("autocast_cuda", dtype="float16", device="cuda")
    op = torch.ops.aten.softmax.int
    assert op_list.lookup(op, {"dim": 0, "dtype": None}).policy == "fp32_set_opt_dtype"
    assert op_list.lookup(op, {"dim": 0, "dtype": torch.float16}) is None


def test_in_place_variants_run_natively():
    op_list = load("autocast_cuda", dtype="float16", device="cuda")
    assert op_list.lookup(torch.ops.aten.exp.default, {}).cls == "deny"
    assert op_list.lookup(torch.ops.aten.exp_.default, {}) is None
