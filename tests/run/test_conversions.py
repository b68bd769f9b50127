"""Why a model that a script trains is not converted."""

from torch import nn

from amp_graph.run.conversions import why_not
from amp_graph.run.options import RunOptions


def test_the_reason_is_that_of_the_model_or_of_the_parts_that_are_chosen():
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Conv1d(1, 1, 1, device="meta")))
    told = "2 tensors are on the meta device and hold no values"
    assert why_not(model, RunOptions.checked("bf16")).startswith(told)
    assert why_not(model, RunOptions.checked("bf16", only="Conv1d")).startswith(told)
    assert why_not(model, RunOptions.checked("bf16", only=r"0|1\.0")).startswith(told)
    assert why_not(model, RunOptions.checked("bf16", only="Linear")) == ""
    assert why_not(model, RunOptions.checked("bf16", only="Conv2d")) == "none of its modules matches --only Conv2d"
    assert why_not(nn.Linear(2, 2), RunOptions.checked("bf16")) == ""
