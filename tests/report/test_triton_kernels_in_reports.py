"""A report on a GPU's model names the Triton kernels that this process gave up, and why."""

from types import SimpleNamespace

from amp_graph.passes.native import triton_loader
from amp_graph.report.report_notes import notes_of_kernels


def model_on(device):
    return SimpleNamespace(parameters=lambda: iter([SimpleNamespace(device=SimpleNamespace(type=device))]))


def test_what_was_given_up_is_named_for_models_on_a_gpu(monkeypatch):
    monkeypatch.setattr(
        triton_loader, "_failed", {"amp_graph.kernels.add_norm_source": "OutOfResources: shared memory"}
    )
    assert list(notes_of_kernels(model_on("cuda"))) == [
        "torch's kernels in place of add_norm: OutOfResources: shared memory"
    ]
    assert not any("add_norm:" in line for line in notes_of_kernels(model_on("cpu")))
