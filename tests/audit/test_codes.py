"""The table of findings: each has a level, a reason and two examples, which docs/internals/audit-codes.md shows."""

import ast
import re
from pathlib import Path

import pytest

from amp_graph.audit.codes import CODES
from amp_graph.audit.records import LEVELS

PAGE = Path(__file__).parents[2] / "docs" / "internals" / "audit-codes.md"


@pytest.mark.parametrize("code", CODES.values(), ids=list(CODES))
def test_a_code_says_what_why_and_what_is_right(code):
    assert re.fullmatch(r"AMP[1-9]\d\d", code.name)
    assert code.level in LEVELS
    assert code.why.strip().endswith(".")
    assert not code.title.endswith(".")
    bad, good = ast.parse(code.bad), ast.parse(code.good)
    assert ast.dump(bad) != ast.dump(good)


def test_the_page_has_an_anchor_for_each_code_and_code_for_each_example():
    text = PAGE.read_text()
    assert re.findall(r"^## (AMP\d+)$", text, re.MULTILINE) == list(CODES)
    assert text.count("```python\n") == 2 * len(CODES)
