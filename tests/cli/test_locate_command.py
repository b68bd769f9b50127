"""``amp-graph locate``: the inputs of TARGET, text and JSON, and a status that scripts can read."""

import json

import pytest

from amp_graph.cli.main import main
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
"""


@pytest.fixture
def locate(tmp_path, capsys):
    (tmp_path / "model_to_locate.py").write_text(SOURCE)

    def run(name, *words):
        status = main(["locate", f"{tmp_path}/model_to_locate.py:{name}", "--policy", "fp16", *words])
        return (status, *capsys.readouterr())

    return run


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
