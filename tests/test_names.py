"""What users import: few names, in order, documented; old spellings work and name the new one."""

import re
import warnings
from pathlib import Path

import pytest

import amp_graph

LESSER = ("Calibration", "bisect", "calibrate", "compare", "memory", "metrics")
DOCS = Path(__file__).parent.parent / "docs"


def test_there_are_at_most_twelve_names_in_order():
    assert len(amp_graph.__all__) <= 12
    assert amp_graph.__all__ == sorted(amp_graph.__all__)


@pytest.mark.parametrize("name", [*amp_graph.__all__, *LESSER])
def test_each_name_is_documented(name):
    assert (getattr(amp_graph, name).__doc__ or "").strip()
    text = "\n".join(page.read_text() for page in DOCS.glob("*.md"))
    assert re.search(rf"`?amp_graph\.{name}\b|`{name}\b", text)


def test_memory_has_what_it_names_and_the_docs_name_it():
    text = "\n".join(page.read_text() for page in DOCS.glob("*.md"))
    assert amp_graph.memory.__all__ == sorted(amp_graph.memory.__all__)
    for name in amp_graph.memory.__all__:
        assert getattr(amp_graph.memory, name).__doc__
        assert f"amp_graph.memory.{name}" in text


@pytest.mark.parametrize("name", ["drop_weight_copies", "raise_malloc_thresholds"])
def test_an_old_spelling_works_and_names_the_new_one(name):
    with pytest.warns(DeprecationWarning, match=f"amp_graph.{name} is now amp_graph.memory.{name}") as told:
        found = getattr(amp_graph, name)
    assert found is getattr(amp_graph.memory, name)
    assert told[0].filename == __file__
    with pytest.warns(DeprecationWarning, match="is now") as told:
        exec(compile(f"from amp_graph import {name}", __file__, "exec"), {})
    assert {one.filename for one in told} == {__file__}
    assert name not in amp_graph.__all__


def test_no_other_name_warns_and_an_unknown_one_is_told_the_known():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for name in amp_graph.__all__:
            getattr(amp_graph, name)
    with pytest.raises(AttributeError, match=r"no attribute 'konvert'; it has AmpGraphError, .*, rewrite$"):
        _ = amp_graph.konvert
