"""Gradients of tables as rows: the operator, and trainings of tied and untied embeddings."""

import contextlib

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import amp_graph
from amp_graph.errors import AmpGraphWarning
from amp_graph.optim.row_sparse_gradient_op import OPS
from amp_graph.optim.row_sparse_gradients import RowSparseGradients
from amp_graph.passes.profitability import thresholds
from amp_graph.scaling.loss_scale import LossScale
from tests.step.test_train_step import build, everything, same

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
@pytest.mark.compiled
def test_rows_are_those_of_the_table(padding, dtype):
    grad, ids = given()
    ids[2, 2] = 7
    slots, rows = OPS.gradient_rows([grad], [ids.to(dtype)], [None], [padding], 100, RULE)
    wanted = BACKWARD(grad.double(), ids, 100, padding, False).float()
    torch.testing.assert_close(as_table(slots, rows), wanted, rtol=1e-6, atol=1e-6)
    assert (slots >= 0).sum() == len(ids.unique()) - (padding == 7)
    assert not torch.equal(wanted, BACKWARD(grad.double(), ids + 1, 100, padding, False).float()), "control"


BAGS = {
    "one length": ([0, 4, 8, 12, 16, 20], False),
    "empty ones": ([0, 0, 3, 3, 20, 24], False),
    "with the last end": ([0, 5, 5, 6, 20, 24], True),
}


@pytest.mark.parametrize("padding", [-1, 7])
@pytest.mark.parametrize("name", BAGS)
@pytest.mark.compiled
def test_rows_are_those_of_bags(name, padding):
    _, ids = given()
    ids, (begins, ends) = ids.flatten(), BAGS[name]
    ids[5] = 7
    table, offsets = torch.zeros(100, 40, dtype=torch.float64, requires_grad=True), torch.tensor(begins)
    options = {"mode": "sum", "include_last_offset": ends, "padding_idx": None if padding < 0 else padding}
    out = F.embedding_bag(ids, table, offsets, **options)
    grad = torch.randn(40, len(out)).t()  # as a view that does not lie in rows
    (wanted,) = torch.autograd.grad(out, table, grad.double())
    for one in (grad, grad.contiguous()):
        slots, rows = OPS.gradient_rows([one], [ids], [offsets], [padding], 100, RULE)
        torch.testing.assert_close(as_table(slots, rows), wanted.float(), rtol=1e-6, atol=1e-6)


@pytest.mark.compiled
def test_ids_behind_the_last_bag_have_no_gradient():
    ids, offsets = torch.tensor([1, 2, 3]), torch.tensor([0, 2])
    slots, _ = OPS.gradient_rows([torch.ones(1, 4)], [ids], [offsets], [-1], 5, RULE)
    assert slots.tolist() == [-1, 0, 1, -1, -1]


@pytest.mark.compiled
def test_a_table_that_is_read_several_times():
    (one, first), (two, second) = given(seed=1), given(seed=2)
    ids, grads = torch.cat([first, second]), torch.cat([one, two])
    wanted = BACKWARD(grads.double(), ids, 100, -1, False).float()
    slots, rows = OPS.gradient_rows([one, two], [first, second], [None, None], [-1, -1], 100, RULE)
    torch.testing.assert_close(as_table(slots, rows), wanted, rtol=1e-6, atol=1e-6)
    # A padding is one reader's own, and more ids than rows need no more rows.
    slots, rows = OPS.gradient_rows([one, two], [first, second], [None, None], [int(first[0, 0]), -1], 100, RULE)
    one = one.masked_fill((first == first[0, 0]).unsqueeze(-1), 0)
    wanted = BACKWARD(torch.cat([one, two]).double(), ids, 100, -1, False).float()
    torch.testing.assert_close(as_table(slots, rows), wanted, rtol=1e-6, atol=1e-6)
    assert len(OPS.gradient_rows([grads] * 3, [ids % 50] * 3, [None] * 3, [-1] * 3, 50, RULE)[1]) == 50


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
@pytest.mark.compiled
def test_every_reader_adds_the_rows(dense, threads, monkeypatch):
    """The same bits as from the sum of table and dense gradient, with shares that end within a row."""
    monkeypatch.setattr("amp_graph.passes.native.jit_compiler.LEAST_OF_A_THREAD", 100)
    grad, ids = given()
    slots, rows = OPS.gradient_rows([grad], [ids], [None], [-1], 100, RULE)
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


class Tables(nn.Module):
    """Bags of sums and means, by rows and by offsets, and a table that two embeddings and a bag read."""

    def __init__(self, **options):
        super().__init__()
        self.sums, self.means = nn.EmbeddingBag(64, 16, mode="sum", **options), nn.EmbeddingBag(64, 16, **options)
        self.items, self.head = nn.Embedding(64, 16), nn.Linear(16, 64)

    def forward(self, ids):
        flat, offsets = ids.flatten(), torch.arange(4) * 3
        found = self.sums(flat, offsets) + self.means(ids) + self.items(ids[:, 0]) + self.items(ids[:, 1])
        found = found + F.embedding_bag(ids[:, 2:], self.items.weight, mode="sum", padding_idx=5)
        return self.head(found).repeat_interleave(4, 0)


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


@pytest.mark.sampled(6)
@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.SGD])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("padding", [None, 3])
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.compiled
def test_trainings_are_those_of_tables(name, tied, padding, optimizer):
    one = trained("one_pass", tied, padding, OPTIONS[name], optimizer)
    two = trained("torch", tied, padding, OPTIONS[name], optimizer)
    torch.testing.assert_close(one[0], two[0], rtol=1e-4, atol=1e-4)
    for a, b in zip(one[1], two[1], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)
    assert "gradient_rows" in one[2]
    assert "embedding_dense_backward" in two[2]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("padding", [None, 3])
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.compiled
def test_trainings_of_bags_are_those_of_tables(name, padding):
    found = []
    for update in ("one_pass", "torch"):
        model, optimizer = build(lambda: Tables(padding_idx=padding))
        options = {k: v for k, v in OPTIONS[name].items() if k != "micro_batches"}
        step = amp_graph.TrainStep(model, F.cross_entropy, optimizer, "bf16", update=update, **options)
        losses = torch.stack([step(x, y) for x, y in batches(8)])
        found.append((losses, everything(model, optimizer), step.graph_text()))
    (losses, ours, text), (wanted, theirs, other) = found
    torch.testing.assert_close(losses, wanted, rtol=1e-4, atol=1e-4)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)
    assert text.count("gradient_rows") == 3
    assert "_backward" not in text.replace("_log_softmax_backward", "").replace("nll_loss_backward", "")
    assert other.count("_embedding_bag_backward") == 3


@pytest.mark.compiled
def test_a_failure_is_in_the_report_and_the_step_goes_on(monkeypatch):
    def fails(*given):
        raise ZeroDivisionError("planted")

    found = []
    for planted in (False, True):
        if planted:
            monkeypatch.setenv("AMP_GRAPH_STRICT", "0")
            monkeypatch.setattr(RowSparseGradients, "run", fails)
        model, optimizer = build(Tables)
        step = amp_graph.TrainStep(model, F.cross_entropy, optimizer, "bf16", update="one_pass")
        with pytest.warns(AmpGraphWarning, match="planted") if planted else contextlib.nullcontext():
            losses = torch.stack([step(x, y) for x, y in batches(4)])
        notes = [note for note in amp_graph.report(step).notes if note.startswith("row-sparse-gradients")]
        found.append((losses, notes))
    (wanted, none), (losses, notes) = found
    torch.testing.assert_close(losses, wanted, rtol=1e-4, atol=1e-4)
    assert none == []
    assert len(notes) == 1
    assert "left out" in notes[0]
    assert "planted" in notes[0]


OTHERS = {"largest": {"mode": "max"}, "by frequency": {"mode": "sum", "scale_grad_by_freq": True}}


@pytest.mark.parametrize("name", [*OTHERS, "weighted"])
@pytest.mark.compiled
def test_other_bags_stay(name):
    class Bags(nn.Module):
        def __init__(self):
            super().__init__()
            self.bag, self.head = nn.EmbeddingBag(64, 16, **OTHERS.get(name, {"mode": "sum"})), nn.Linear(16, 8)

        def forward(self, ids):
            weights = {"per_sample_weights": torch.ones(ids.shape)} if name == "weighted" else {}
            return self.head(self.bag(ids, **weights))

    model, optimizer = build(Bags)
    step = amp_graph.TrainStep(model, F.cross_entropy, optimizer, "bf16", update="one_pass")
    step(torch.randint(64, (4, 4)), torch.randint(8, (4,)))
    assert "gradient_rows" not in step.graph_text()
    assert "one_pass_update_" in step.graph_text()


@pytest.mark.compiled
@pytest.mark.parametrize("elements", [64 * 16 * 3, 64 * 16 * 3 + 64 * 17 + 1])
def test_tables_count_where_it_is_decided_how_to_update(elements, monkeypatch):
    monkeypatch.setattr(thresholds, "FEWEST_UPDATED", elements)
    model, optimizer = build(Tables)
    step = amp_graph.TrainStep(model, F.cross_entropy, optimizer, "bf16")
    step(*next(batches(1)))
    assert ("one_pass_update_" in step.graph_text()) == (elements == 64 * 16 * 3)


@pytest.mark.compiled
def test_tables_that_most_tokens_read_stay():
    """32 ids read half of 64 rows at most; of the 32 places, 4 are read, but 64 ids would be more than half."""
    model, optimizer = build(lambda: Words(tied=True))
    step = amp_graph.TrainStep(model, F.cross_entropy, optimizer, "bf16", update="one_pass")
    ids = torch.randint(64, (16, 4))
    step(ids, torch.randint(64, (64,)))
    assert step.graph_text().count("gradient_rows") == 1  # of the places
    assert step.graph_text().count("index_add_") + step.graph_text().count("embedding_dense_backward") == 1


@pytest.mark.compiled
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
