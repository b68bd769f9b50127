"""``amp-graph locate``: the inputs of TARGET, text and JSON, and a status that scripts can read."""

import json

import pytest
import torch

from amp_graph.errors import AmpGraphWarning

SOURCE = """
import torch
from torch import nn
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 4)
    def forward(self, x):
        return self.second(self.first(x).abs() * 1e4)
def build(size=1.0):
    print("a word of the user's")
    torch.manual_seed(0)
    return Net(), (torch.full((3, 8), size),)
def large():
    return build(100.0)
def bare():
    return build()[0]
def loss(out, y):
    return nn.functional.cross_entropy(out, y)
"""


@pytest.fixture
def locate(amp):
    return lambda name, *words: amp("locate", f"FILE:{name}", "--policy", "fp16", *words)


def test_the_line_that_overflows_is_named(locate):
    status, out, _ = locate("large", "--scale", "2", "--json")
    told = json.loads(out)
    assert (status, told["kind"], told["direction"], told["scale"]) == (3, "overflow", "forward", 2.0)
    assert "* 1e4" in told["line"]


def test_the_fix_that_is_printed_helps_as_it_is_and_a_pattern_without_a_match_is_told(locate):
    status, out, _ = locate("large")
    assert (status, out.partition(" in ")[0]) == (3, "overflow")
    policy = next(line for line in out.splitlines() if "which keeps it in fp32" in line).split("'")[1]
    assert locate("large", "--policy", policy)[0] == 0
    with pytest.warns(AmpGraphWarning, match="secnod.*matches no module of Net.*\\n.*second"):
        assert locate("large", "--policy", "fp16,keep_fp32=secnod")[0] == 3


def test_where_nothing_is_found_and_without_inputs(locate):
    status, out, err = locate("build")
    assert (status, out.split(":")[0]) == (0, "nothing found")
    assert "a word of the user's" in err
    status, _, err = locate("bare")
    assert (status, "--input" in err) == (1, True)


@pytest.mark.parametrize("batch", [("x", "y"), ["x", "y"], "x"], ids=["a tuple", "a list", "inputs alone"])
@pytest.mark.parametrize("target", ["build", "bare"])
def test_a_saved_batch_and_a_loss_serve_targets_with_inputs_and_without(locate, file, tmp_path, batch, target):
    """The inputs that the target gives overflow nowhere."""
    path, values = tmp_path / "batch.pt", {"x": torch.full((3, 8), 100.0), "y": torch.zeros(3, dtype=torch.long)}
    torch.save(values["x"] if batch == "x" else type(batch)(values[name] for name in batch), path)
    loss = () if batch == "x" else ("--loss", f"{file}:loss")
    status, out, _ = locate(target, "--batch", str(path), *loss)
    assert (status, "* 1e4" in out) == (3, True)


@pytest.mark.parametrize(
    ("content", "words", "told"),
    [
        (None, ("--batch", "{}"), "No such file"),
        (b"not a pickle", ("--batch", "{}"), "is not a batch of tensors"),
        (b"", ("--loss", "torch.nn.functional:cross_entropy"), "--loss needs targets"),
    ],
)
def test_what_is_no_batch_is_refused(locate, tmp_path, content, words, told):
    path = tmp_path / "batch.pt"
    if content is not None:
        path.write_bytes(content)
    status, _, err = locate("build", *(word.format(path) for word in words))
    assert status == 1
    assert told in err
    assert "fix:" in err
