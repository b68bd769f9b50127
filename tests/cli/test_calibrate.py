"""Machines as data, and `amp-graph calibrate`, which writes one that later plans read."""

import pytest
import torch

import amp_graph
from amp_graph.cli import command_calibrate
from amp_graph.cli.command_calibrate import calibrate
from amp_graph.cli.main import main
from amp_graph.passes.precision import machine_rates
from amp_graph.passes.precision.machine_rates import FAMILIES, MACHINES, machine_for, machine_text, read_machine

NAMES = sorted(path.stem for path in MACHINES.glob("*.toml"))


def built_in(name):
    return read_machine((MACHINES / f"{name}.toml").read_text(), name)


def test_there_is_a_machine_for_every_class():
    assert NAMES == ["cpu", "cpu_amx", "cpu_bf16", "cuda"]
    assert machine_rates.class_of("cpu").device == "cpu"
    assert machine_rates.class_of("cuda").name == "cuda"


@pytest.mark.parametrize("name", NAMES)
def test_a_machine_is_its_text(name):
    found = built_in(name)
    assert read_machine(machine_text(found), name) == found
    assert set(found.rates) == set(FAMILIES)


@pytest.mark.parametrize("name", [name for name in NAMES if name != "cuda"])
def test_fp16_products_are_not_faster_on_a_cpu(name):
    rates = built_in(name).rates["matmul"]
    assert rates["float16"] < rates["float32"]
    assert (rates["bfloat16"] > rates["float32"]) == (name != "cpu")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("[matmul]", "[mat]"), "machine, product_call, matmul"),
        (("call = ", "calls = "), "name, device"),
        (("bfloat16 = ", "bf16 = "), "float32, bfloat16, float16"),
        (("kept = 1", "kept = -1"), "kept = -1"),
        (("float32 = 1", 'float32 = "1"#'), "a number above 0"),
        (("[machine]", "[machine"), "not TOML"),
    ],
)
def test_a_file_that_is_no_machine_is_refused(change, message):
    text = (MACHINES / "cpu_amx.toml").read_text()
    assert change[0] in text
    with pytest.raises(amp_graph.AmpGraphError, match=message) as error:
        read_machine(text.replace(*change), "mine.toml")
    assert "mine.toml" in str(error.value)
    assert "amp-graph calibrate" in str(error.value)


def test_calibrating_measures_every_rate(monkeypatch):
    monkeypatch.setattr("amp_graph.cli.command_calibrate.ROUNDS", 1)
    threads = torch.get_num_threads()
    found = calibrate("cpu", seconds=1e-4)
    assert torch.get_num_threads() == threads
    assert read_machine(machine_text(found), "calibrated").device == "cpu"
    numbers = [found.call, found.kept, *(rate for rates in found.rates.values() for rate in rates.values())]
    assert len(numbers) == 2 + 3 * len(FAMILIES) - 1
    assert all(0 < number < 1e15 for number in numbers)
    assert len(set(numbers)) > len(numbers) // 2


def test_later_plans_read_what_calibrate_wrote(monkeypatch, tmp_path, capsys):
    """Planned for a machine of fast bf16, a product is low; for the calibrated one, of slow bf16, it is not."""
    slow = built_in("cpu")
    monkeypatch.setattr(command_calibrate, "calibrate", lambda device: slow)
    monkeypatch.setattr(machine_rates, "class_of", lambda device: built_in("cpu_amx"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.delenv("AMP_GRAPH_MACHINE")
    assert precision() == "low"
    assert main(["calibrate"]) == 0
    assert "; plans read " in capsys.readouterr().out
    assert machine_for("cpu") == slow
    assert machine_for("cuda").name == "cpu_amx"  # what the file says is of a CPU
    assert precision() == "full"


def precision():
    model = torch.nn.Linear(256, 256)
    amp_graph.convert(model, "bf16,skip_unprofitable=true")
    model(torch.randn(512, 256))
    (node,) = [n for n in amp_graph.report(model).graphs[0].nodes if n.cls == "allow"]
    return node.precision


def test_another_file_may_be_named(monkeypatch, tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text((MACHINES / "cpu.toml").read_text().replace('name = "cpu"', 'name = "mine"'))
    monkeypatch.setenv("AMP_GRAPH_MACHINE", str(path))
    assert machine_for("cpu").name == "mine"
    monkeypatch.setenv("AMP_GRAPH_MACHINE", str(tmp_path / "none.toml"))
    with pytest.raises(amp_graph.AmpGraphError, match="AMP_GRAPH_MACHINE names no file"):
        machine_for("cpu")
    monkeypatch.setenv("AMP_GRAPH_MACHINE", "default")
    assert machine_for("cpu").name in NAMES


def test_errors_of_the_command(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(command_calibrate, "calibrate", lambda device: built_in("cpu"))
    (tmp_path / "file").write_text("")
    assert main(["calibrate", "--output", str(tmp_path / "file" / "machine.toml")]) == 1
    assert "calibrate: cannot write" in capsys.readouterr().err
    if not torch.cuda.is_available():
        assert main(["calibrate", "--device", "cuda"]) == 1
        assert "no CUDA device" in capsys.readouterr().err
