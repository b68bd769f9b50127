"""The gradient of an embedding table by Triton: the sums of fp64, rounded once, and torch's own."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import amp_graph
from amp_graph.capture.conversion import conversion_of
from amp_graph.passes.backends.cuda.embedding_functions import low_rows, tied_rows
from amp_graph.passes.backends.cuda.kernels import embedding_gradient as kernels
from amp_graph.passes.native import triton_loader
from amp_graph.passes.profitability import cuda_kernel_thresholds
from tests.passes.backends.cuda.kernels.where import DEVICE, gave_up, mark_where_they_run

pytestmark = mark_where_they_run()
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@pytest.fixture(autouse=True)
def _by_triton(monkeypatch):
    """Sum short parts in narrow blocks; what falls back to torch fails."""
    monkeypatch.setattr(kernels, "PART", 8)
    monkeypatch.setattr(kernels, "BLOCK", 32)
    monkeypatch.setattr(triton_loader, "_failed", {})
    yield
    assert not gave_up()


def drawn(*shape, seed=0, dtype=FP32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(DEVICE)


def indices(*shape, count, seed=1):
    return torch.randint(count, shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def exact(grad, ids, count, padding=-1, base=None):
    rows = grad.unsqueeze(1).expand(*ids.shape, -1) if grad.dim() == ids.dim() else grad
    zeros = torch.zeros(count, grad.shape[-1], dtype=torch.float64, device=DEVICE)
    table = zeros.index_add_(0, ids.reshape(-1).long(), rows.reshape(-1, grad.shape[-1]).double())
    if padding >= 0:
        table[padding] = 0
    return table if base is None else table + base.double()


def check(grad, ids, count, padding=-1, base=None):
    made = kernels.embedding_gradient(grad, ids, count, padding, base)
    assert (made.dtype, made.shape) == (FP32, (count, grad.shape[-1]))
    # Sums of fp32 numbers: each of up to a few hundred summands.
    torch.testing.assert_close(made.double(), exact(grad, ids, count, padding, base), rtol=1e-6, atol=2e-5)
    return made


SIZES = {
    "one index": ((1,), 7, 16),
    "one row": ((40,), 1, 16),
    "odd": ((5, 7), 23, 33),
    "narrow": ((30,), 11, 1),
    "wide": ((19,), 5, 100),
    "few rows": ((3, 50), 2, 17),
    "more rows than indices": ((3,), 101, 16),
    "parts of whole rows": ((96,), 3, 16),
}


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
@pytest.mark.parametrize("name", SIZES)
def test_sums_are_those_of_fp64(name, dtype):
    shape, count, width = SIZES[name]
    grad, ids = drawn(*shape, width, dtype=dtype), indices(*shape, count=count)
    made = check(grad, ids, count)
    torchs = torch.ops.aten.embedding_dense_backward(grad.float(), ids, count, -1, False)
    torch.testing.assert_close(made, torchs, rtol=1e-6, atol=2e-5)


@pytest.mark.parametrize("at", [0, 3, 8, 13])
@pytest.mark.parametrize("run", [1, 7, 8, 15, 16, 24, 41])
def test_runs_of_one_index_wherever_parts_begin(at, run):
    ids = torch.cat([torch.arange(at), torch.full((run,), 20), torch.arange(21, 30)]).to(DEVICE)
    check(drawn(len(ids), 16, dtype=BF16), ids, 31)


def test_the_order_of_the_indices_is_that_of_the_sums():
    """Repeated indices are out of order; equal calls give equal bits, whatever stands between equal indices."""
    grad, ids = drawn(60, 16), indices(60, count=4)
    made = check(grad, ids, 4)
    assert torch.equal(made, kernels.embedding_gradient(grad, ids, 4, -1))
    by_row = torch.sort(ids, stable=True).indices
    assert torch.equal(made, kernels.embedding_gradient(grad[by_row], ids[by_row], 4, -1))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_the_row_of_padding_has_no_gradient(dtype):
    ids = indices(4, 20, count=3).to(dtype)
    made = check(drawn(4, 20, 16, dtype=BF16), ids, 5, padding=1)
    assert not made[1].any()
    assert made[0].any()


@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("padding", [-1, 2])
def test_a_gradient_from_elsewhere_is_added(dtype, padding):
    base = drawn(9, 33, seed=3, dtype=dtype)
    check(drawn(4, 9, 33, dtype=BF16), indices(4, 9, count=5), 9, padding, base)
    check(drawn(4, 33, dtype=BF16), indices(4, count=5), 9, padding, drawn(33, 9, seed=3, dtype=dtype).t())


def test_rows_of_bags_are_not_expanded():
    check(drawn(6, 16, dtype=BF16), indices(6, 10, count=4), 4, padding=2)


@pytest.mark.parametrize("apart", ["expanded", "transposed", "every second"])
def test_gradients_of_any_layout(apart):
    grad = {
        "expanded": lambda: drawn(1, 16).expand(30, 16),
        "transposed": lambda: drawn(16, 30).t(),
        "every second": lambda: drawn(30, 33)[:, :32:2],
    }[apart]()
    check(grad, indices(30, count=7), 7)
    check(grad[:, :1].expand(30, 16), indices(30, count=7), 7)


def test_nothing_is_read():
    none = torch.empty(0, dtype=torch.int64, device=DEVICE)
    assert not check(drawn(0, 16), none, 4).any()
    check(drawn(0, 16), none, 4, base=drawn(4, 16, dtype=BF16))
    assert kernels.embedding_gradient(drawn(2, 0), indices(2, count=3), 3, -1).shape == (3, 0)


def test_a_nan_stays_in_its_row():
    grad, ids = drawn(30, 16, dtype=BF16), indices(30, count=5)
    grad[3], grad[4, 2] = torch.nan, torch.inf
    made = kernels.embedding_gradient(grad, ids, 5, -1)
    assert torch.equal(made.isfinite(), exact(grad, ids, 5).isfinite())


def test_operators_and_what_fake_tensors_tell():
    grad, ids = drawn(4, 16, dtype=BF16), indices(4, count=5)
    for base in (None, drawn(5, 16, dtype=BF16)):
        given = (grad, ids, 5, -1, base)
        torch.library.opcheck(kernels.KERNELS.backward.default, given, test_utils=("test_schema", "test_faketensor"))


# -- functions and models ------------------------------------------------------------------------------------------

IDS = torch.randint(20, (4, 9), generator=torch.Generator().manual_seed(6))


def step(function, of_low=True):
    table = drawn(23, 33, seed=5).requires_grad_()
    rows, low = function(table)
    loss = (rows.float() * drawn(*rows.shape, seed=7)).sum()
    if of_low:
        loss = loss + (low.float() * drawn(*low.shape, seed=8)).sum()
    return rows, low, torch.autograd.grad(loss, table)[0]


@pytest.mark.parametrize("bags", [False, True])
@pytest.mark.parametrize("of_low", [False, True])
def test_gradients_are_those_of_embedding_and_casts(bags, of_low):
    def torchs(table):
        if bags:
            return F.embedding_bag(IDS.to(DEVICE), table, mode="sum", padding_idx=3).to(BF16), table.to(BF16)
        return F.embedding(IDS.to(DEVICE), table, -20).to(BF16), table.to(BF16)

    padding = 3 if bags else -20
    expected = step(torchs, of_low)
    got = step(lambda table: tied_rows(table, IDS.to(DEVICE), padding, bags, BF16, BF16), of_low)
    assert all(map(torch.equal, got[:2], expected[:2]))
    torch.testing.assert_close(got[2], expected[2], rtol=1e-6, atol=2e-5)
    alone = step(lambda table: (low_rows(table, IDS.to(DEVICE), padding, bags, BF16), table.to(BF16)), of_low)
    torch.testing.assert_close(alone[2], expected[2], rtol=1e-6, atol=2e-5)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.words, self.types = nn.Embedding(50, 32, padding_idx=3), nn.Embedding(2, 32)
        self.first = nn.Linear(32, 32)

    def forward(self, ids):
        x = self.first(self.words(ids) + self.types((ids > 9).long()))
        return F.cross_entropy(F.linear(x, self.words.weight).flatten(0, 1).float(), ids.roll(1, 1).flatten())


def grads(model, dtype=None):
    with torch.autocast(DEVICE, dtype or BF16, enabled=dtype is not None):
        loss = model(IDS.to(DEVICE))
    loss.backward()
    return [p.grad.double() for p in model.parameters()]


def far(got, expected):
    return ((got - expected).norm() / expected.norm()).item()


def test_a_converted_model_is_as_exact_as_autocast(monkeypatch):
    monkeypatch.setattr(cuda_kernel_thresholds, "LEAST_SPARED", 1)
    kernels.kernels(BF16)
    launched, launch = [], kernels.launch
    monkeypatch.setattr(kernels, "launch", lambda m, k, *a, **o: launched.append(k) or launch(m, k, *a, **o))
    expected, theirs = grads(Tied().double().to(DEVICE)), grads(Tied().to(DEVICE), BF16)
    model = amp_graph.convert(Tied().to(DEVICE), "bf16,device=cuda", strict=True)
    got = grads(model)
    assert launched.count("table_kernel") == 2
    done = {p.name: len(p.result.changes) for p in conversion_of(model).graphs[0].rewritten.passes}
    assert done["lower-embedding-gradients"] == 2
    assert all(far(a, e) <= 1.05 * far(b, e) for a, b, e in zip(got, theirs, expected, strict=True))


def test_a_whole_step_has_one_node_for_the_table(monkeypatch):
    monkeypatch.setattr(cuda_kernel_thresholds, "LEAST_SPARED", 1)

    def trained(policy):
        model = Tied().to(DEVICE)
        step = amp_graph.TrainStep(model, None, torch.optim.SGD(model.parameters(), 0.1), policy)
        return [step(IDS.to(DEVICE)).item() for _ in range(3)], step.graph_text()

    losses, text = trained("bf16,device=cuda")
    assert text.count("amp_graph.embedding_gradient") == 2
    assert "embedding_dense_backward" not in text
    expected, _ = trained("bf16,device=cuda,skip=lower_embedding_gradients")
    assert losses == pytest.approx(expected, rel=1e-4)


# -- broken controls, and standing aside ---------------------------------------------------------------------------


def one_less(kernel, given):
    """The last index of each row is forgotten."""
    return (given[0], given[1], (given[2] - 1).clamp(min=0), *given[3:]) if kernel == "table_kernel" else given


def no_parts(kernel, given):
    return (*given[:3], torch.zeros_like(given[3]), *given[4:]) if kernel == "table_kernel" else given


@pytest.mark.parametrize("change", [one_less, no_parts])
def test_control_a_wrong_kernel_is_seen(change, monkeypatch):
    launch = kernels.launch
    monkeypatch.setattr(kernels, "launch", lambda m, k, p, given, **o: launch(m, k, p, change(k, given), **o))
    with pytest.raises(AssertionError):
        check(drawn(60, 16), indices(60, count=2), 2)
    monkeypatch.setattr(triton_loader, "_checked", set())
    with pytest.raises(kernels.CompilerError, match="not torch's on this device"):
        kernels.kernels(BF16)
    triton_loader._failed.clear()


def test_what_does_not_compile_is_left_to_torch(monkeypatch):
    monkeypatch.setattr(kernels, "SOURCE", "amp_graph.passes.backends.cuda.kernels.no_such_source")
    check(drawn(4, 9, 33, dtype=BF16), indices(4, 9, count=5), 9, 2, drawn(9, 33, seed=3, dtype=BF16))
    assert "ModuleNotFoundError" in next(iter(triton_loader.why_failed().values()))
    triton_loader._failed.clear()
