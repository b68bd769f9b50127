"""The zoo's runner, with a tiny model of its own and with controls that are wrong on purpose."""

import json
import math
import os
import time
from dataclasses import replace

import pytest
import torch
from torch import nn

from tests.layers import forward_of, layers
from tests.zoo.catalogue import models
from tests.zoo.limits import rows_of
from tests.zoo.model import ZooModel, args
from tests.zoo.results import Results
from tests.zoo.table import failing, markdown
from tests.zoo.trial import Trial

TINY = ZooModel(
    "own", "own/tiny",
    lambda: nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.5), nn.Tanh(), nn.Linear(16, 4)),
    lambda size: args(torch.randn(4 * size, 8)),
)  # fmt: skip


@layers(lambda model, word: dict(model=model))
def Wrong(self, x):
    """A model of which no two calls return the same bits, and of which nothing is captured."""
    return self.model(x) * (1 + time.perf_counter() % 1e-3)


def test_a_model_passes_all_stages_and_is_measured():
    row = Trial(TINY, "bf16").run()
    assert row["ok"], row["cause"]
    assert row["captured"] == 1.0
    assert 0.5 < row["ratio"] < 1.5
    assert all(1e-5 < error < 0.1 for error in row["errors"])


def test_a_conversion_that_computes_other_bits_is_found():
    row = Trial(TINY, "bf16", Wrong).run()
    assert not row["ok"]
    assert "evaluate: Refused" in row["cause"]
    assert row["captured"] == 0.0


def test_gradients_that_overflow_where_those_of_autocast_do_not_are_found():
    def overflow(model, word):
        model[0].weight.register_hook(lambda gradient: gradient * math.inf)
        return model

    row = Trial(TINY, "bf16", overflow).run()
    assert not row["ok"]
    assert "errors: not finite in 3 of 3 seeds, autocast's are" in row["cause"]


def test_a_model_that_overflows_with_a_loss_scale_under_autocast_is_measured_without_one():
    # The loss times 1024 is infinite in bf16.
    row = Trial(replace(TINY, loss=lambda outputs: outputs.mean() * 2.0**118), "bf16").run()
    assert row["ok"], row["cause"]
    assert row["seeds"] == 3
    assert 0.5 < row["ratio"] < 1.5


@forward_of(nn.Linear)
def Meets(self, x):
    """Multiplies a low value by an fp32 one, which torch.autocast leaves alone."""
    linear = nn.Linear.forward
    return linear(self, torch.tensordot(linear(self, x), self.weight, dims=([-1], [0])))


def test_where_autocast_itself_fails_there_is_a_note_and_no_ratio(tmp_path):
    row = Trial(replace(TINY, build=lambda: Meets(8, 8)), "bf16").run()
    assert row["ok"], row["cause"]
    assert row["captured"] == 1.0
    assert row["seeds"] == 0
    assert math.isnan(row["ratio"])
    assert row["notes"] == ["errors: torch.autocast itself fails: RuntimeError: both inputs should have same dtype"]
    results = Results(tmp_path / "zoo.json")
    results.put("own/meets", [{"uncounted": ""}, {"word": "bf16", **row}])
    assert "torch.autocast itself fails" in markdown(results.models, 1)


def test_a_conversion_that_raises_is_a_cause_unless_fp32_raises_too():
    def refuse(model, word):
        raise RuntimeError("no\n  fix: none")

    row = Trial(TINY, "bf16", refuse).run()
    assert row["cause"].startswith("train: RuntimeError: no;")
    row = Trial(replace(TINY, batch=lambda size: args(torch.randn(size, 9 if size == 3 else 8))), "bf16").run()
    assert row["ok"], row["cause"]
    assert row["notes"][0].startswith("other_size: fp32 fails as well: RuntimeError")


def test_a_child_tells_rows_and_its_death_is_one():
    def twice(tell):
        tell({"a": 1})
        tell({"b": 2})

    def dies(tell):
        tell({"a": 1})
        os.abort()

    def eats(tell):
        tell({"size": len(bytearray(1 << 40))})

    assert rows_of(twice) == [{"a": 1}, {"b": 2}]
    assert rows_of(dies) == [{"a": 1}, {"died": "killed by SIGABRT"}]
    assert rows_of(eats)[-1]["died"].startswith("MemoryError")


def test_rows_are_kept_and_what_fails_is_told(tmp_path):
    good = {"ok": True, "cause": "", "notes": [], "captured": 1.0, "ratio": 1.75, "output": 1.0, "gradient": 2.0}
    results = Results(tmp_path / "zoo.json")
    results.put("own/high", [{"uncounted": ""}, {"word": "bf16", **good}, {"word": "fp16", **good, "ratio": 0.9}])
    results.put("own/dead", [{"uncounted": ""}, {"word": "bf16", **good}, {"died": "killed by SIGSEGV"}])
    results.put("own/odd", [{"uncounted": "RuntimeError: data | dependent"}])
    held = Results(tmp_path / "zoo.json")
    assert held.models == results.models
    assert held.has("own/high")
    assert [name for name in held.models if failing(held.models[name])] == ["own/dead"]
    text = markdown(held.models, 4)
    assert "Measured: 3 of the zoo's 4 models." in text
    assert "| bf16 | 2 | 2 | 100.0% | 1.750 | 1.75 | 2 |" in text
    assert "- own/dead, fp16: killed by SIGSEGV" in text
    assert "- own/high, bf16: 1.75" in text
    assert "- own/odd: RuntimeError: data \\| dependent" in text


def test_the_zoo_is_large_and_its_table_is_what_its_file_gives():
    entries = models()
    assert len(entries) >= 150
    assert len({name.split("/")[0] for name in entries}) >= 10
    from tests.zoo.__main__ import OUTPUT

    if not OUTPUT.exists():
        pytest.skip("nothing was measured: make zoo")
    held = json.loads(OUTPUT.read_text())["models"]
    assert OUTPUT.with_suffix(".md").read_text() == markdown(held, len(entries)), (
        "python -m tests.zoo --only none writes it"
    )
    assert held.keys() <= entries.keys()
    assert all(math.isfinite(row["seconds"]) for found in held.values() for row in found.values() if "seconds" in row)
