"""Module paths are matched as Python's ``re`` matches them, in bounded time."""

import json

import pytest
from torch import nn

import amp_graph
from amp_graph.lists import ListError, path_pattern
from amp_graph.lists.parse import parse
from amp_graph.lists.path_pattern import PatternError, check_pattern, matches
from amp_graph.policy import Policy


@pytest.mark.parametrize(
    ("pattern", "path", "expected"),
    [
        (".*norm", "model.layers.3.norm", True),
        (".*norm", "model.layers.3.norm.weight", False),
        ("lm_head|.*norm", "lm_head", True),
        ("(?!lm_head).*", "lm_head", False),
        (r"layers\.(1[0-9]|[0-3])\..*", "layers.17.mlp", True),
        (r"layers\.(1[0-9]|[0-3])\..*", "layers.7.mlp", False),
        ("", "", True),
        ("", "a", False),
        ("(?i)LM_HEAD", "lm_head", True),
        ("(?x) lm  _head  # the last", "lm_head", True),
        ("[[a]", "[", True),
        (r"(a)b\1", "aba", True),
        ("a{2,}b{,3}", "aab", True),
    ],
)
def test_patterns_that_people_write(pattern, path, expected):
    assert matches(pattern, path) is expected


@pytest.mark.parametrize("pattern", ["(a+)+b", "(.*)*x", ".*a.*a.*a.*a.*a.*b", "(?=(a*)*b)" * 20])
def test_patterns_that_hang_in_python_are_answered(pattern):
    assert not matches(pattern, "a" * 300)


@pytest.mark.parametrize("pattern", ["(a|aa)+b", ".*(a|aa)+b", "((a|aa)+)+b", "(a{1,30}){1,300}b"])
def test_patterns_that_run_away_are_one_error(pattern, monkeypatch):
    monkeypatch.setattr(path_pattern, "SECONDS", 0.1)
    with pytest.raises(amp_graph.errors.PolicyError, match=r"(?s)keep_fp32=.*more than 0.1 s to match.*legal:.*fix:"):
        amp_graph.convert(nn.ModuleDict({"a" * 300: nn.Linear(2, 2)}), amp_graph.Policy(keep_fp32=pattern))
    with pytest.raises(ListError, match=r"more than 0\.1 s"):
        matches(pattern, "a" * 300)


REFUSED = {
    "not closed": "(",
    "nothing to repeat": "*norm",
    "nested parentheses": "(" * 5000 + ")" * 5000,
    "repeated too often": "((a{300}){300}){300}",
    "repeated too often, of which the library alone says nothing": "((a{50}){50}){50}",
    "thousands of digits": "a{" + "9" * 4999 + "}",
    "a large repetition": "a{99999999999}",
    "too long": "a" * 3000,
    "syntax of another library": "(?R)*a",
    "lone backslash": "\\",
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_matched_is_refused_by_name(name):
    pattern = REFUSED[name]
    with pytest.raises(PatternError, match=r"legal:"):
        check_pattern(pattern)
    with pytest.raises(amp_graph.errors.PolicyError, match=r"(?s)keep_fp32=.*legal:.*fix:") as caught:
        Policy(keep_fp32=pattern)
    assert len(str(caught.value)) < 1500
    text = f'[[module]]\npath = {json.dumps(pattern)}\nprecision = "full"\nwhy = "so"\n'
    with pytest.raises(ListError, match=r"(?s)bad regex.*legal:.*fix:"):
        parse(text, "mine.toml")
