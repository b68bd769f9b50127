"""The rates of a GPU: products of low precision are faster there, and what plans read them from is written."""

from amp_graph.cli.command_calibrate import calibrate
from amp_graph.passes.precision.machine_rates import machine_text, read_machine


def test_calibrating_measures_every_rate(monkeypatch):
    monkeypatch.setattr("amp_graph.cli.command_calibrate.ROUNDS", 1)
    found = calibrate("cuda", seconds=1e-3)
    text = machine_text(found)  # rounded
    assert machine_text(read_machine(text, "calibrated")) == text
    for low in ("bfloat16", "float16"):
        assert found.rates["matmul"][low] > 2 * found.rates["matmul"]["float32"]
        assert found.rates["elementwise"][low] > found.rates["elementwise"]["float32"] / 2
