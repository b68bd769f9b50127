"""PyTorch's own database of operators: no error, dtype, stride or value but for those that ``operators.toml`` explains.

Here a few of them; ``make conformance`` asks for all, with bf16 and fp16.
"""

import importlib
import os
import warnings
from pathlib import Path

import pytest

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    import tomli as tomllib

SAMPLE = (
    "nn.functional.linear", "inner", "einsum", "nn.functional.layer_norm", "native_layer_norm", "sort", "softmax",
    "nn.functional.interpolate.area", "index_put", "sparse.sampled_addmm", "nn.functional.conv2d", "cumsum",
)  # fmt: skip
POLICIES = ("bf16", "fp16")
EXCEPTIONS = Path(__file__).with_name("operators.toml")


def all_names():
    if not os.environ.get("AMP_GRAPH_CONFORMANCE"):  # the database takes seconds to load
        return []
    return sorted(harness().operators())


def harness():
    with warnings.catch_warnings():  # torch's test-suite says which packages of its own are not there
        warnings.simplefilter("ignore")
        return importlib.import_module("tests.conformance.operators")


def exceptions():
    return tomllib.loads(EXCEPTIONS.read_text())["exception"]


def is_explained(finding):
    policies = {finding.policy, finding.policy.partition(",")[0]}
    return any(
        finding.operator in e["operators"]
        and finding.kind == e["kind"]
        and not policies.isdisjoint(e.get("policies", POLICIES))
        for e in exceptions()
    )


def unexplained(name, policy, samples):
    found = harness().findings(name, harness().operators()[name], policy, samples)
    return [str(f) for f in found if not is_explained(f)]


@pytest.mark.filterwarnings("ignore")
def test_a_sample_of_operators():
    assert [line for name in SAMPLE for line in unexplained(name, "bf16", 1)] == []


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", all_names())
def test_every_operator(name, policy):
    assert unexplained(name, policy, 4) == []


@pytest.mark.filterwarnings("ignore")
def test_control_a_wrong_result_is_found(monkeypatch):
    """A converted program that is wrong by 5 %, or has another dtype, is found: the comparison sees it."""
    found = harness()
    convert = found.amp_graph.convert

    def wrong(program, policy):
        run = convert(program, policy)
        return lambda *given: run(*given) * 1.05

    def low(program, policy):
        run = convert(program, policy)
        return lambda *given: run(*given).bfloat16()

    for broken, kind in ((wrong, "result value"), (low, "result dtype")):
        monkeypatch.setattr(found.amp_graph, "convert", broken)
        assert kind in {f.kind for f in found.findings("add", found.operators()["add"], "bf16", 1)}


def test_every_exception_has_a_reason():
    policies = {p.partition(",")[0] for e in exceptions() for p in e.get("policies", POLICIES)}
    assert policies <= {*POLICIES}
    assert all(e["why"] and e["operators"] for e in exceptions())
