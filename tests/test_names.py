"""What users import: few names, in order, documented."""

import re
from pathlib import Path

import pytest

import amp_graph
from tests.warned import warnings_are_errors

LESSER = ("Calibration", "Limits", "audit", "bisect", "calibrate", "compare", "frozen", "metrics", "search", "thaw")
DOCS = Path(__file__).parent.parent / "docs"


def test_there_are_at_most_twelve_names_in_order():
    assert len(amp_graph.__all__) <= 12
    assert amp_graph.__all__ == sorted(amp_graph.__all__)


@pytest.mark.parametrize("name", [*amp_graph.__all__, *LESSER])
def test_each_name_is_documented(name):
    assert (getattr(amp_graph, name).__doc__ or "").strip()
    text = "\n".join(page.read_text() for page in DOCS.rglob("*.md"))
    assert re.search(rf"`?amp_graph\.{name}\b|`{name}\b", text)


def test_no_name_warns_and_an_unknown_one_is_told_the_known():
    with warnings_are_errors(Warning):
        for name in amp_graph.__all__:
            getattr(amp_graph, name)
    with pytest.raises(AttributeError, match=r"no attribute 'konvert'; it has AmpGraphError, .*, rewrite$"):
        _ = amp_graph.konvert
