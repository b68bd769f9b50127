"""The gradient of a table as rows, and a dense part where it is tied: the numbers of one dense gradient."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.optim import SGD, Adagrad, Adam, AdamW

import amp_graph
from amp_graph.passes.loss_scaling import name_joint
from amp_graph.passes.manager import run_passes
from amp_graph.passes.step import row_gradients, update_parameters
from amp_graph.passes.step.row_gradients import RowGradients
from tests.layers import layers, words_and_head

ROWS, WIDTH, OFF = 96, 8, "row_gradients"


@layers(
    lambda tied=True, reads=1, **options: dict(
        **words_and_head(ROWS, WIDTH, tied, **options), inner=nn.Linear(WIDTH, WIDTH), reads=reads
    ),
    seed=0,
)
def Tied(self, ids):
    """Words that are a head as well; ``reads``: how often the table is read."""
    found = sum(self.words(ids.roll(i) * (i + 1) % ROWS) for i in range(self.reads))
    return F.cross_entropy(self.head(self.inner(found)), ids)


def batches(count, size=12):
    generator = torch.Generator().manual_seed(1)
    for _ in range(count):
        ids = torch.randint(ROWS, (size,), generator=generator)
        ids[:4] = 5  # one id several times
        yield ids


def trained(policy="bf16", skip="", make=AdamW, size=12, steps=4, tied=True, reads=1, embedding=None, **options):
    model = Tied(tied, reads, **(embedding or {}))
    optimizer = make(model.parameters(), lr=0.1)
    policy = f"{policy},skip={skip}" if skip else policy
    step = amp_graph.TrainStep(model, None, optimizer, policy, **options)
    for ids in batches(steps, size):
        step(ids)
    state = [t for p in model.parameters() for t in optimizer.state[p].values() if isinstance(t, torch.Tensor)]
    return [*model.parameters(), *state], step.graph_text()


OPTIMIZERS = {
    "sgd": SGD,
    "momentum": lambda p, lr: SGD(p, lr, momentum=0.9, weight_decay=0.1),
    "adam": Adam,
    "adamw": lambda p, lr: AdamW(p, lr, weight_decay=0.1, amsgrad=True),
    "adagrad": Adagrad,
}


@pytest.mark.sampled(5)
@pytest.mark.parametrize("embedding", [{}, {"padding_idx": 5}], ids=str)
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("policy", ["bf16", "bf16,keep_fp32=head", "bf16-O2"])
@pytest.mark.parametrize("tied", [True, False])
def test_rows_are_updated_as_by_a_dense_gradient(tied, policy, make, embedding):
    ours, text = trained(policy, make=make, embedding=embedding, tied=tied)
    plain, without = trained(policy, OFF, make, embedding=embedding, tied=tied)
    assert ("index_copy_" in text) == ("O2" not in policy), "a table in bf16 has a gradient in bf16"
    assert "index_copy_" not in without
    assert all(map(torch.equal, ours, plain))


@pytest.mark.parametrize("make", [OPTIMIZERS["momentum"], OPTIMIZERS["adamw"]])
def test_several_embeddings_of_one_table(make):
    ours, text = trained(make=make, reads=2, size=6, steps=2)
    assert "index_copy_" in text
    torch.testing.assert_close(
        list(ours), list(trained(skip=OFF, make=make, reads=2, size=6, steps=2)[0]), rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize(
    "options",
    [{"clip_norm": 0.1}, {"clip_norm": 0.1, "tied": False}, {"micro_batches": 2}, {"policy": "fp16"}],
    ids=str,
)
def test_what_else_reads_the_gradient_gets_all_of_it(options):
    ours, text = trained(**options)
    assert "add_rows" in text
    assert "index_copy_" not in text
    assert all(map(torch.equal, ours, trained(skip=OFF, **options)[0]))


@pytest.mark.parametrize(
    "options",
    [{"embedding": {"scale_grad_by_freq": True}}, {"size": 25}, {"size": 0}, {"policy": "bf16-O0"}],
    ids=str,
)
def test_other_gradients_are_left_alone(options):
    empty = options.get("size") == 0
    ours, text = trained(**options, steps=1 if empty else 2, make=SGD)
    assert "index_copy_" not in text
    plain = trained(**options, steps=1 if empty else 2, make=SGD, skip=OFF)[0]
    assert all(torch.equal(a, b) or empty for a, b in zip(ours, plain, strict=True))


@pytest.mark.parametrize(
    ("module", "name", "broken", "options"),
    [
        (row_gradients, "_sums_of_equal", lambda ids, rows, count: rows, {}),
        (update_parameters, "_is_unread_sum", lambda grad: grad.target is row_gradients.ADD_ROWS, {"clip_norm": 0.1}),
    ],
)
def test_control(module, name, broken, options, monkeypatch):
    plain = trained(skip=OFF, make=SGD, **options)[0]
    monkeypatch.setattr(module, name, broken)
    try:
        assert not all(map(torch.equal, trained(make=SGD, **options)[0], plain))
    except amp_graph.errors.PassError:
        assert options, "the gradient is read"


def gradient(table, grad, ids, dense):
    rows = torch.ops.aten.embedding_dense_backward(grad * 2, ids, len(table), -1, False)
    return rows, (dense.bfloat16() * 2)


def whole(table, grad, ids, dense):
    rows, low = gradient(table, grad, ids, dense)
    return table.sum(), low.float() + rows


def written_later(table, grad, ids, dense):
    rows, low = gradient(table, grad, ids, dense)
    total = low.float() + rows
    low.zero_()
    return table.sum(), total


def of_an_input(table, grad, ids, dense):
    rows = torch.ops.aten.embedding_dense_backward(grad, ids, len(table), -1, False)
    return table.sum(), dense * 2 + rows


def twice(table, grad, ids, dense):
    rows, low = gradient(table, grad, ids, dense)
    return table.sum(), (low.float() + low.float()) + rows


@pytest.mark.parametrize(("function", "fits"), [(whole, 1), (written_later, 0), (of_an_input, 0), (twice, 0)])
def test_parts_that_change_before_they_are_read_are_left_alone(function, fits):
    given = torch.randn(40, 4), torch.randn(3, 4), torch.tensor([1, 1, 7]), torch.randn(40, 4)
    gm = make_fx(function, tracing_mode="fake")(*given)
    name_joint(gm, {"table": 1}, parameters={"table": gm.graph.find_nodes(op="placeholder")[0]}, seed="sum_1")
    expected = gm(*given)
    (done,) = run_passes(gm, [RowGradients()], checked=True, strict=True)
    assert len(done.result.changes) == fits
    assert ("aten.add.Tensor" in gm.code) != fits
    torch.testing.assert_close(gm(*given), expected, rtol=0, atol=1e-6)
