"""Gradients of tables as rows: the operator, and trainings of tied and untied embeddings."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import amp_graph
from amp_graph.loss_scale import LossScale
from amp_graph.one_pass_ops import OPS
from tests.test_train_step import build, everything, same

RULE = "adam decoupled bf16"
BACKWARD = torch.ops.aten.embedding_dense_backward


def given(count=24, table=100, width=40, seed=0):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(table, (count // 4, 4), generator=generator)
    ids[0, :3] = ids[1, 0]  # several times the same
    return torch.randn(*ids.shape, width, generator=generator), ids


def as_table(slots, rows):
    found = torch.zeros(len(slots), rows.shape[1])
    found[slots >= 0] = rows[slots[slots >= 0].long()]
    return found


@pytest.mark.parametrize("padding", [-1, 7])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_rows_are_those_of_the_table(padding, dtype):
    grad, ids = given()
    ids[2, 2] = 7
    slots, rows = OPS.gradient_rows(grad, ids.to(dtype), 100, padding, RULE)
    wanted = BACKWARD(grad.double(), ids, 100, padding, False).float()
    torch.testing.assert_close(as_table(slots, rows), wanted, rtol=1e-6, atol=1e-6)
    assert (slots >= 0).sum() == len(ids.unique()) - (padding == 7)
    assert not torch.equal(wanted, BACKWARD(grad.double(), ids + 1, 100, padding, False).float()), "control"


def updated(grads, **options):
    generator = torch.Generator().manual_seed(3)
    params = [torch.randn(100, 40, generator=generator), torch.randn(33, generator=generator)]
    moments = [torch.zeros_like(p) for p in params * 2]
    steps, lows = [torch.zeros(()) for _ in params], [p.bfloat16() for p in params]
    lr, found_inf = torch.tensor(0.01, dtype=torch.float64), None
    numbers = {"weight_decay": 0.01, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8}
    args = (params, grads, moments, steps, lows, [0, 1], lr, found_inf, torch.tensor(0.5), None)
    OPS.one_pass_update_(*args, rule=RULE, **numbers, **options)
    return [*params, *moments, *lows]


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("dense", ["bf16", "fp32", "none"])
def test_every_reader_adds_the_rows(dense, threads, monkeypatch):
    """The same bits as from the sum of table and dense gradient, with shares that end within a row."""
    monkeypatch.setattr("amp_graph.one_pass_ops.LEAST_OF_A_THREAD", 100)
    grad, ids = given()
    slots, rows = OPS.gradient_rows(grad, ids, 100, -1, RULE)
    other, bias = torch.randn(100, 40), torch.randn(33).bfloat16()
    other = {"bf16": other.bfloat16(), "fp32": other, "none": torch.zeros(100, 40)}[dense]
    total = as_table(slots, rows) + other.float()
    alone = [0] if dense == "none" else []
    grads, options = [rows if alone else other, bias], {"rows": [slots, rows], "with_rows": [0], "alone": alone}
    torch.set_num_threads(threads)
    try:
        assert same(updated(grads, **options), updated([total, bias]))
        sums, wanted = ([torch.ones(100, 40), torch.ones(33)] for _ in range(2))
        OPS.add_gradients_(sums, grads, RULE, **options)
        OPS.add_gradients_(wanted, [total, bias], RULE)
        assert same(sums, wanted)
        ours, theirs = OPS.look_at_gradients(grads, RULE, **options), OPS.look_at_gradients([total, bias], RULE)
        torch.testing.assert_close(ours[1], theirs[1], rtol=1e-6, atol=0)
        rows[slots.max(), -1] = float("nan")  # the last element of the last row
        assert (ours[0], OPS.look_at_gradients(grads, RULE, **options)[0]) == (0, 1)
    finally:
        torch.set_num_threads(1)


class Words(nn.Module):
    def __init__(self, tied, padding=None):
        super().__init__()
        self.words, self.places = nn.Embedding(64, 16, padding_idx=padding), nn.Embedding(32, 16)
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, 64)
        if tied:
            self.head.weight = self.words.weight

    def forward(self, ids):
        return self.head(self.norm(self.words(ids) + self.places(torch.arange(ids.shape[1])))).flatten(0, 1)


def batches(count):
    generator = torch.Generator().manual_seed(5)
    for _ in range(count):
        yield torch.randint(64, (4, 4), generator=generator), torch.randint(64, (16,), generator=generator)


OPTIONS = {
    "plain": {},
    "clipped": {"clip_norm": 0.3, "clip_value": 0.05},
    "scaled": {"loss_scale": LossScale(2.0**10), "clip_norm": 0.3},
    "micro-batches": {"micro_batches": 4},
}


def trained(update, tied, padding, options, optimizer=torch.optim.AdamW):
    model, made = build(lambda: Words(tied, padding), optimizer=optimizer)
    step = amp_graph.TrainStep(model, F.cross_entropy, made, "bf16", update=update, **options)
    losses = torch.stack([step(x, y) for x, y in batches(8)])
    return losses, everything(model, made), step.graph_text()


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.SGD])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("padding", [None, 3])
@pytest.mark.parametrize("name", OPTIONS)
def test_trainings_are_those_of_tables(name, tied, padding, optimizer):
    one = trained("one_pass", tied, padding, OPTIONS[name], optimizer)
    two = trained("torch", tied, padding, OPTIONS[name], optimizer)
    torch.testing.assert_close(one[0], two[0], rtol=1e-4, atol=1e-4)
    for a, b in zip(one[1], two[1], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)
    assert "gradient_rows" in one[2]
    assert "embedding_dense_backward" in two[2]


def test_tables_that_most_tokens_read_stay():
    """32 ids read half of 64 rows at most; of the 32 places, 4 are read, but 64 ids would be more than half."""
    model, optimizer = build(lambda: Words(tied=True))
    step = amp_graph.TrainStep(model, F.cross_entropy, optimizer, "bf16", update="one_pass")
    ids = torch.randint(64, (16, 4))
    step(ids, torch.randint(64, (64,)))
    assert step.graph_text().count("gradient_rows") == 1  # of the places
    assert step.graph_text().count("index_add_") + step.graph_text().count("embedding_dense_backward") == 1


def test_infinite_rows_are_seen():
    model, optimizer = build(lambda: Words(tied=True))
    options = {"loss_scale": LossScale(2.0**8), "update": "one_pass"}
    step = amp_graph.TrainStep(model, F.cross_entropy, optimizer, "bf16", **options)
    x, y = next(batches(1))
    step(x, y)
    before = everything(model, optimizer)
    with torch.no_grad():
        model.norm.weight[0] = float("inf")
    step(x, y)
    assert step.skipped_steps == 1
    assert same([t for t in before if t.shape != (16,)], [t for t in everything(model, optimizer) if t.shape != (16,)])
