"""Converted models and whole steps whose losses and norms are Triton's: as exact as autocast, losses of the loop."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import amp_graph
from amp_graph.capture.conversion import conversion_of
from amp_graph.passes.backends.cpu.norm import choose_norm_kernel
from amp_graph.passes.backends.cuda.kernels import add_norm, cross_entropy
from amp_graph.passes.native import kernel_table, triton_loader
from amp_graph.passes.profitability import cuda_kernel_thresholds, thresholds
from tests.passes.backends.cuda.kernels.where import DEVICE, gave_up, mark_where_they_run, round_as_gpus_do

pytestmark = mark_where_they_run()
WIDTH, WORDS = 32, 50
SKIP = "bf16,skip=fuse_cross_entropy|fuse_add_norm"


@pytest.fixture(autouse=True)
def launched(monkeypatch):
    """Choose the kernels for models of any size, on the CPU in the interpreter; the names of those that ran."""
    seen, launch = set(), triton_loader.launch
    monkeypatch.setattr(triton_loader, "_failed", {})
    for module in (add_norm, cross_entropy):
        name = "cross_entropy" if module is cross_entropy else "add_norm"
        monkeypatch.setitem(kernel_table._loaders, f"{name} on {DEVICE}", module.kernels)
        module.kernels(torch.bfloat16)
        monkeypatch.setattr(module, "launch", lambda m, k, *a, **o: seen.add(k) or launch(m, k, *a, **o))
    monkeypatch.setattr(choose_norm_kernel, "library", lambda low: None)
    for name in ("FEWEST_LOGITS", "FEWEST_NORMED"):
        monkeypatch.setattr(thresholds, name, 1)
        monkeypatch.setattr(cuda_kernel_thresholds, name, 1)
    monkeypatch.setattr(thresholds, "multiplies_bf16", lambda: True)
    monkeypatch.setattr(cuda_kernel_thresholds, "NARROWEST", 1)
    monkeypatch.setattr(cuda_kernel_thresholds, "FEWEST_ROWS", 1)
    round_as_gpus_do(monkeypatch)
    yield seen
    assert not gave_up()


class Words(nn.Module):
    def __init__(self, norm):
        super().__init__()
        torch.manual_seed(0)
        self.words, self.norms = nn.Embedding(WORDS, WIDTH), nn.ModuleList(norm(WIDTH) for _ in range(3))
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, ids):
        x = self.words(ids)
        for norm, block in zip(self.norms, self.blocks, strict=False):
            x = x + block(norm(x))
        logits = F.linear(self.norms[2](x), self.words.weight)
        return F.cross_entropy(logits.view(-1, WORDS), ids.roll(1, 1).view(-1), label_smoothing=0.1)


IDS = torch.randint(WORDS, (3, 7), generator=torch.Generator().manual_seed(1))
ALL = {"rows_kernel", "gradient_kernel", "forward_kernel", "backward_kernel"}


def grads(model, dtype=None):
    with torch.autocast(DEVICE, dtype or torch.bfloat16, enabled=dtype is not None):
        loss = model(IDS.to(DEVICE))
    loss.backward()
    return [p.grad.double() for p in model.parameters()]


def error(got, exact):
    return ((got - exact).norm() / exact.norm()).item()


@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.RMSNorm])
def test_gradients_are_as_exact_as_autocasts(norm, launched):
    exact, theirs = grads(Words(norm).double().to(DEVICE)), grads(Words(norm).to(DEVICE), torch.bfloat16)
    model = amp_graph.convert(Words(norm).to(DEVICE), "bf16")
    converted = grads(model)
    assert launched == ALL
    done = {p.name: len(p.result.changes) for p in conversion_of(model).graphs[0].rewritten.passes}
    assert (done["fuse-cross-entropy"], done["fuse-add-norm"]) == (1, 3)
    assert all(error(a, e) <= 1.1 * error(b, e) for a, b, e in zip(converted, theirs, exact, strict=True))


@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.RMSNorm])
def test_whole_steps_have_a_node_for_each_direction(norm, launched):
    def trained(policy):
        model = Words(norm).to(DEVICE)
        step = amp_graph.TrainStep(model, None, torch.optim.SGD(model.parameters(), 0.1), policy)
        return [step(IDS.to(DEVICE)).item() for _ in range(4)], step.graph_text()

    losses, text = trained("bf16")
    assert launched == ALL
    for name in ("cross_entropy_and_stats", "cross_entropy_backward_of_stats_"):  # over the logits
        assert text.count(name) == 1
    assert losses[-1] < losses[0]
    launched.clear()
    expected, text = trained(SKIP)
    assert not launched
    assert losses == pytest.approx(expected, rel=2e-3)
