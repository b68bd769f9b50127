"""Gradients of tables in compiled graphs: memory used again, the same numbers, and nobody's gradient written over."""

import gc

import pytest
import torch
from torch import nn

import amp_graph
from amp_graph.passes.memory import reuse_embedding_gradients
from amp_graph.passes.memory.gradient_buffers import OPS, POOL, Pool
from tests.layers import layers

ROWS, WIDTH = 512, 16
IDS = torch.randint(ROWS, (8, 4), generator=torch.Generator().manual_seed(1))


class User:
    pass


# -- the pool ---------------------------------------------------------------------------------------------


def test_memory_is_given_again_once_nobody_has_it():
    pool, user = Pool(), User()
    pool.reserve({(4, 2): 1}, user)
    first = pool.zeros(4, 2)
    place = first.add_(1).data_ptr()
    held = first[1:]
    del first
    other = pool.zeros(4, 2)
    assert other.data_ptr() != place, "a view of it is held"
    assert torch.equal(held, torch.ones(3, 2))
    del held, other
    again = pool.zeros(4, 2)
    assert again.data_ptr() == place
    assert not again.any()


def test_no_more_is_kept_than_a_graph_has_tables():
    pool, user = Pool(), User()
    pool.zeros(4, 2)
    assert not pool.tensors, "nobody asked for it"
    pool.reserve({(4, 2): 2}, user)
    pool.reserve({(4, 2): 1, (3, 3): 1}, user)
    held = [pool.zeros(4, 2) for _ in range(5)]
    assert len(pool.tensors) == 2
    assert len({t.data_ptr() for t in held}) == 5
    pool.leave(user)
    assert not pool.tensors


def test_what_was_kept_goes_with_the_last_who_asked():
    pool, one, two = Pool(), User(), User()
    pool.reserve({(4, 2): 1}, one)
    pool.reserve({(4, 2): 1}, two)
    pool.zeros(4, 2)
    del one
    assert len(pool.tensors) == 1
    del two
    assert not pool.tensors
    pool.zeros(4, 2)
    assert not pool.tensors


@pytest.mark.parametrize("padding", [-1, 5])
def test_the_operator_adds_up_rows_as_torch_does(padding):
    rows = torch.randn(IDS.numel(), WIDTH, generator=torch.Generator().manual_seed(2))
    ids = IDS.flatten() % 8
    found = OPS.table_gradient(rows, ids, 9, padding)
    assert torch.allclose(found, torch.ops.aten.embedding_dense_backward(rows, ids, 9, padding, False), atol=1e-6)
    assert not found[8].any()
    torch.library.opcheck(OPS.table_gradient.default, (rows, ids, 9, padding), test_utils=("test_faketensor",))


# -- compiled models --------------------------------------------------------------------------------------


@layers(
    lambda: dict(
        bag=nn.EmbeddingBag(ROWS, WIDTH, mode="sum"),
        words=nn.Embedding(ROWS, WIDTH, padding_idx=3),
        head=nn.Linear(WIDTH, 1),
    ),
    seed=0,
)
def Tables(self, ids):
    return self.head(self.bag(ids) + self.words(ids[:, 0]))


def gradients(model, ids):
    model(ids).square().sum().backward()
    found = [p.grad for p in model.parameters()]
    model.zero_grad(set_to_none=True)
    return found


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
def test_compiled_gradients_stay_and_their_memory_is_used_again(monkeypatch):
    monkeypatch.setattr(reuse_embedding_gradients, "LEAST_TABLES", 0)
    ours = amp_graph.convert(Tables(), "bf16", compile="inductor")
    plain = amp_graph.convert(Tables(), "bf16,skip=reuse_embedding_gradients", compile="inductor")
    places = []
    for turn in range(3):
        ids = (IDS + turn) % ROWS
        ids[0, 0] = 3
        found = gradients(ours, ids)
        for got, wanted in zip(found, gradients(plain, ids), strict=True):
            assert torch.allclose(got, wanted, rtol=1e-5, atol=1e-6)
        places.append({found[0].data_ptr(), found[1].data_ptr()})
        del found, got
    assert places[0] == places[1] == places[2] == {t.data_ptr() for t in POOL.tensors}
    held = gradients(ours, IDS)
    copies = [g.clone() for g in held]
    gradients(ours, (IDS + 1) % ROWS)
    assert all(torch.equal(a, b) for a, b in zip(held, copies, strict=True))
    assert sum(t.nbytes for t in POOL.tensors) == 2 * ROWS * WIDTH * 4
    del ours, held
    gc.collect()
    assert not POOL.tensors


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
@pytest.mark.parametrize("compile", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_a_step_uses_one_memory_for_all_tables_of_a_shape(compile, monkeypatch):
    monkeypatch.setattr(reuse_embedding_gradients, "LEAST_TABLES", 0)

    def trained(policy):
        model = Tables()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        step = amp_graph.TrainStep(model, lambda y: y.square().sum(), optimizer, policy, compile=compile)
        losses = [step((IDS + turn) % ROWS) for turn in range(3)]
        return losses, list(model.parameters()), len(POOL.tensors), step.graph_text()

    losses, ours, kept, text = trained("bf16")
    wanted, plain, none, _ = trained("bf16,skip=reuse_embedding_gradients")
    assert text.count("amp_graph.table_gradient") == 2
    assert 1 <= kept <= 2
    assert none == 0
    assert torch.allclose(torch.stack(losses), torch.stack(wanted), rtol=1e-5)
    assert all(torch.allclose(a, b, rtol=1e-4, atol=1e-5) for a, b in zip(ours, plain, strict=True))
