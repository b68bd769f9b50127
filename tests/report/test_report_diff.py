"""The difference of two reports: precisions, casts and reasons, of reports and of the dicts that files hold."""

import json

import pytest
import torch
from torch import nn

import amp_graph
from amp_graph.errors import AmpGraphError


def told(policy, width=16):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width), nn.Softmax(-1))
    amp_graph.convert(model, policy)(torch.randn(4, width))
    return amp_graph.report(model)


def test_what_a_policy_keeps_full_is_told_with_both_reasons():
    diff = told("bf16").diff(told("bf16,keep_fp32=2"))
    assert diff.settings == {"policy": ("bf16-O1", "bf16-O1,keep_fp32=2")}
    (changed,) = [node for node in diff.nodes if node.module == "2"]
    assert (changed.before, changed.after, changed.ops) == ("low", "full", "linear")
    assert "a matrix product" in changed.reason_before
    assert "kept by keep_fp32" in changed.reason_after
    assert {(c.change, c.source, c.to) for c in diff.casts} >= {
        ("removed", "2.weight", "bf16"),
        ("removed", "2.bias", "bf16"),
    }
    text = diff.text()
    assert "policy: bf16-O1 -> bf16-O1,keep_fp32=2" in text
    assert f"low -> full  {changed.name} (linear) in 2: kept by keep_fp32" in text
    assert "removed 2.weight -> bf16" in text
    assert str(diff) == text
    assert json.loads(json.dumps(diff.to_dict()))["nodes"]


def test_the_other_way_round_is_the_opposite():
    there, back = told("bf16").diff(told("bf16,deny=linear")), told("bf16,deny=linear").diff(told("bf16"))
    assert [(n.name, n.before, n.after) for n in there.nodes] == [(n.name, n.after, n.before) for n in back.nodes]
    assert {(c.source, c.to, c.change) for c in there.casts} == {
        (c.source, c.to, {"added": "removed", "removed": "added"}[c.change]) for c in back.casts
    }


def test_equal_reports_do_not_differ():
    diff = told("bf16").diff(told("bf16"))
    assert not diff
    assert diff.text() == "no difference\n"


def test_a_dict_from_a_file_is_a_report():
    old = json.loads(json.dumps(told("bf16").to_dict()))
    assert not told("bf16").diff(old)
    assert told("fp16").diff(old).settings["dtype"] == ("f16", "bf16")


def test_a_graph_that_one_report_lacks_is_told():
    whole = told("bf16")
    diff = whole.diff({**whole.to_dict(), "graphs": []})
    assert diff
    assert "graphs: 1 -> 0" in diff.text()


@pytest.mark.parametrize("bad", [{}, {"format": 2, "graphs": []}, {"format": 1}])
def test_what_is_no_report_is_refused(bad):
    with pytest.raises(AmpGraphError, match="is not a report of format 1"):
        told("bf16").diff(bad)
