"""Module paths are matched as Python's ``re`` matches them, in bounded time."""

import random
import re
import warnings

import pytest

import amp_graph
from amp_graph.lists import ListError, ModuleRule, effective
from amp_graph.lists.path_pattern import PatternError, check_pattern, matches
from amp_graph.policy import Policy

ATOMS = (
    "a", "b", ".", r"\.", r"\d", r"\w", r"\W", r"\s", "[ab]", "[^a]", "[a-c1]", r"[^\d.]", r"[\]^-]", "A", r"\b", r"\B",
    "^", "$", r"\Z", r"\A", "é", "\n", "(?i:A)", "(?s:.)", r"(?a:\w)", "(?m:$)", "(?m:^)", "(?<=a)", "(?<!b)",
    "(?<=ab|b.)", r"(?<!\w\d)",
)  # fmt: skip
REPEATS = ("*", "+", "?", "{2}", "{1,3}", "{0,}", "*?", "+?", "??", "{,2}", "{2,}?")
GROUPS = ("(%s)", "(?:%s)", "(?:%s|)", "(?=%s)", "(?!%s)")


def pattern(rng, depth=4):
    kind = rng.random()
    if depth == 0 or kind < 0.35:
        return rng.choice(ATOMS)
    if kind < 0.55:
        return pattern(rng, depth - 1) + pattern(rng, depth - 1)
    if kind < 0.7:
        return f"({pattern(rng, depth - 1)}){rng.choice(REPEATS)}"
    if kind < 0.8:
        return f"({pattern(rng, depth - 1)}|{pattern(rng, depth - 1)})"
    return rng.choice(GROUPS) % pattern(rng, depth - 1)


def differences(count, seed, ours=matches):
    rng, found = random.Random(seed), []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(count):
            text = pattern(rng)
            try:
                plain = re.compile(text)
            except re.error:
                continue
            for _ in range(6):
                path = "".join(rng.choice("aabb1.AéÉ\n_ ") for _ in range(rng.randrange(9)))
                if (plain.fullmatch(path) is not None) is not ours(text, path):
                    found.append((text, path))
    return found


def test_any_pattern_matches_what_python_says():
    assert differences(600, seed=0) == []


@pytest.mark.slow
def test_many_patterns_match_what_python_says():
    assert differences(60_000, seed=1) == []


def test_a_matcher_that_is_wrong_is_found():
    assert differences(200, seed=0, ours=lambda pattern, path: re.match(pattern, path) is not None)


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
    ],
)
def test_patterns_that_people_write(pattern, path, expected):
    assert matches(pattern, path) is expected


HANGING = (
    "(a+)+b", "(a|aa)+b", "(.*)*x", "(a*)*b", ".*a.*a.*a.*a.*a.*b", "((((((a?){9}){9}){9}){9}){9}){9}b",
    "(?=(a*)*b)" * 20, "(a{1,1000}){1,1000}b",
)  # fmt: skip


@pytest.mark.parametrize("pattern", HANGING)
def test_patterns_that_hang_elsewhere_are_answered(pattern):
    """By Python's ``re`` this test would take years."""
    assert not matches(pattern, "a" * 300)
    policy = Policy.parse(f"bf16,keep_fp32={pattern}".replace(",1000", "\\,1000"))
    with pytest.warns(amp_graph.errors.AmpGraphWarning, match="matches no module"):
        amp_graph.convert(_deep(), policy)


def _deep():
    from torch import nn

    model = nn.Linear(2, 2)
    for _ in range(12):
        model = nn.Sequential(nn.ModuleDict({"a" * 20: model}))
    return model


REFUSED = {
    "not closed": "(",
    "nothing to repeat": "*norm",
    "nested parentheses": "(" * 5000 + ")" * 5000,
    "many groups": "(" * 60 + ")" * 60,
    "thousands of digits": "a{" + "9" * 4999 + "}",
    "a large repetition": "a{99999999999}",
    "too long": "a" * 3000,
    "asks for a group again": r"(a)\1",
    "asks for a group's being there": "(?P<x>a)?(?(x)b|c)",
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
    rule = ModuleRule(pattern, "full", "so")
    with pytest.raises(ListError, match=r"(?s)bad regex.*legal:.*fix:"):
        effective([], dtype="bfloat16", device="cpu", modules=[rule])
