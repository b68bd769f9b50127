"""``amp-graph locate``: a batch from a file or from TARGET, text and JSON, and a status that scripts can read."""

import json

import pytest
import torch

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
def build():
    print("a word of the user's")
    torch.manual_seed(0)
    return Net(), (torch.ones(3, 8),)
def bare():
    return build()[0]
def loss(out, y):
    return nn.functional.cross_entropy(out, y)
def loud(out):
    return (out.float().abs() * 1e38).mean()
"""


@pytest.fixture
def locate(tmp_path, capsys):
    (tmp_path / "model_to_locate.py").write_text(SOURCE)

    def run(*words):
        status = main(["locate", f"{tmp_path}/model_to_locate.py:build", "--policy", "fp16", *words])
        return (status, *capsys.readouterr())

    return run


def test_a_saved_batch_and_a_loss(locate, tmp_path):
    path = tmp_path / "batch.pt"
    torch.save((torch.full((3, 8), 100.0), torch.zeros(3, dtype=torch.long)), path)
    loss = f"{tmp_path}/model_to_locate.py:loss"
    status, out, _ = locate("--batch", str(path), "--loss", loss, "--scale", "2", "--json")
    told = json.loads(out)
    assert (status, told["kind"], told["direction"], told["scale"]) == (3, "overflow", "forward", 2.0)
    assert "* 1e4" in told["line"]
    status, out, _ = locate("--batch", str(path), "--loss", loss)
    assert status == 3
    assert out.startswith("overflow in forward")


def test_a_saved_batch_without_targets(locate, tmp_path):
    """Its loss is the one that is named, or else one that any outputs have."""
    path = tmp_path / "batch.pt"
    for size, loss, planted in ((1.0, "loud", "* 1e38"), (100.0, None, "* 1e4"), (1.0, None, "")):
        torch.save(torch.full((3, 8), size), path)
        words = ("--loss", f"{tmp_path}/model_to_locate.py:{loss}") if loss else ()
        status, out, _ = locate("--batch", str(path), *words, "--json")
        told = json.loads(out)
        assert (status, told["direction"]) == ((3, "forward") if planted else (0, "")), told
        assert planted in told["line"]


def test_the_fix_that_is_printed_helps_as_it_is_and_a_pattern_without_a_match_is_told(locate, tmp_path):
    path = tmp_path / "batch.pt"
    torch.save(torch.full((3, 8), 100.0), path)
    _, out, _ = locate("--batch", str(path))
    policy = next(line for line in out.splitlines() if "which keeps it in fp32" in line).split("'")[1]
    assert locate("--batch", str(path), "--policy", policy)[0] == 0
    for absent in ("fp16,keep_fp32=secnod", "fp16,keep_ops=secnod:linear"):
        with pytest.warns(AmpGraphWarning, match="secnod.*matches no module of Net.*\\n.*second"):
            assert locate("--batch", str(path), "--policy", absent)[0] == 3


def test_the_inputs_of_target_where_nothing_is_found(locate):
    status, out, err = locate()
    assert (status, out.split(":")[0]) == (0, "nothing found")
    assert "a word of the user's" in err


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
    status, _, err = locate(*(word.format(path) for word in words))
    assert status == 1
    assert told in err
    assert "fix:" in err


@pytest.mark.parametrize("batch", [("x", "y"), ["x", "y"], "x"], ids=["a tuple", "a list", "inputs alone"])
def test_a_batch_serves_a_target_that_gives_no_inputs(tmp_path, capsys, batch):
    (tmp_path / "bare_to_locate.py").write_text(SOURCE)
    path, values = tmp_path / "batch.pt", {"x": torch.full((3, 8), 100.0), "y": torch.zeros(3, dtype=torch.long)}
    torch.save(values["x"] if batch == "x" else type(batch)(values[name] for name in batch), path)
    loss = () if batch == "x" else ("--loss", f"{tmp_path}/bare_to_locate.py:loss")
    words = ["locate", f"{tmp_path}/bare_to_locate.py:bare", "--policy", "fp16", "--batch", str(path), *loss]
    assert main(words) == 3
    assert "* 1e4" in capsys.readouterr().out


def test_without_a_batch_a_target_without_inputs_is_refused(tmp_path, capsys):
    (tmp_path / "bare_to_locate.py").write_text(SOURCE)
    assert main(["locate", f"{tmp_path}/bare_to_locate.py:bare"]) == 1
    assert "--input" in capsys.readouterr().err
