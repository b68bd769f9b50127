"""Gradients of tables in memory that is used again: the same numbers, and nobody's gradient is written over."""

import gc
from unittest.mock import Mock

import pytest
import torch
from torch import nn

import amp_graph
from amp_graph.capture.conversion import conversion_of
from amp_graph.passes.memory import gradient_buffers, reuse_embedding_gradients
from amp_graph.passes.memory.gradient_buffers import OPS, POOL
from tests.layers import layers, words_and_head
from tests.memory_holders import SEEN
from tests.threads import in_threads

ROWS, WIDTH = 512, 16
IDS = torch.randint(ROWS, (8, 4), generator=torch.Generator().manual_seed(1))
OFF = "bf16,skip=reuse_embedding_gradients"


@pytest.fixture(autouse=True)
def _any_table_is_large(monkeypatch):
    monkeypatch.setattr(reuse_embedding_gradients, "LEAST_TABLES", 0)
    yield
    gc.collect()
    assert not POOL.tensors, "every model is gone"


@layers(
    lambda reads=2, **options: dict(
        reads=reads,
        bag=nn.EmbeddingBag(ROWS, WIDTH, **{"mode": "sum"} | options),
        words=nn.Embedding(ROWS, WIDTH, padding_idx=3),
        head=nn.Linear(WIDTH, 1),
    ),
    seed=0,
)
def Tables(self, ids):
    return self.head(self.bag(ids) + sum(self.words(ids[:, i]) for i in range(self.reads)))


def converted(policy="bf16", **options):
    return amp_graph.convert(Tables(**options), policy, strict=True)


def rewritten(model):
    return [c for g in conversion_of(model).graphs for c in g.rewritten.gm.code.split() if "table_rows" in c]


def step(model, ids=IDS):
    model(ids).square().sum().backward()
    return [p.grad for p in model.parameters()]


def trained(policy, **how):
    model = converted(policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    for turn in range(4):
        step(model, (IDS + turn) % ROWS)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(**how)
    return list(model.parameters())


@pytest.mark.parametrize("how", [{}, {"set_to_none": False}])
def test_it_trains_as_without(how):
    torch.testing.assert_close(list(trained("bf16", **how)), list(trained(OFF, **how)))


def test_gradients_are_as_exact_as_torchs():
    exact, ours, plain = Tables().double(), converted(), converted(OFF)
    ids = torch.cat([IDS, IDS, IDS + 3, torch.full_like(IDS, 3)]).clamp(max=ROWS - 1)
    for a, b, true in zip(step(ours, ids), step(plain, ids), step(exact, ids), strict=True):
        assert (a - true).norm() <= 1.01 * (b - true).norm() + 1e-6
    assert not ours.words.weight.grad[3].any(), "of the padding"
    assert rewritten(ours)
    assert not rewritten(plain)


@pytest.mark.parametrize("padding", [-1, 5])
@pytest.mark.parametrize("bags", [False, True])
def test_rows_are_added_place_by_place_or_written_out(bags, padding, monkeypatch):
    ids = IDS % 8
    grad = torch.randn(*ids.shape, WIDTH, generator=torch.Generator().manual_seed(2))
    grad = grad[:, 0] if bags else grad
    rows = grad[:, None].expand(*ids.shape, -1) if bags else grad
    expected = torch.ops.aten.embedding_dense_backward(rows.contiguous(), ids, 9, padding, False)
    spread = gradient_buffers.spread
    for least in (0, 1 << 60):
        monkeypatch.setattr(gradient_buffers, "LEAST_BY_PLACE", least)
        written = Mock(wraps=spread)
        monkeypatch.setattr(gradient_buffers, "spread", written)
        found = gradient_buffers.add_rows(torch.zeros(9, WIDTH), grad, ids, padding)
        torch.testing.assert_close(found, expected)
        assert not found[8].any()
        assert written.called == (least > 0 or not bags)


@pytest.mark.parametrize("padding", [-1, 5])
def test_the_operator_adds_up_rows_as_torch_does(padding):
    rows = torch.randn(IDS.numel(), WIDTH, generator=torch.Generator().manual_seed(2))
    ids = IDS.flatten() % 8
    found = OPS.table_gradient(rows, ids, 9, padding)
    assert torch.allclose(found, torch.ops.aten.embedding_dense_backward(rows, ids, 9, padding, False), atol=1e-6)
    assert not found[8].any()
    torch.library.opcheck(OPS.table_gradient.default, (rows, ids, 9, padding), test_utils=("test_faketensor",))


def test_memory_is_used_again_and_cleared():
    model = converted()
    first, kept = step(model)[0].data_ptr(), {t.data_ptr() for t in POOL.tensors}
    model.bag.weight.grad.add_(1)
    model.zero_grad()
    assert {first, step(model, IDS + 1)[0].data_ptr()} <= kept == {t.data_ptr() for t in POOL.tensors}
    torch.testing.assert_close(model.bag.weight.grad, step(converted(OFF), IDS + 1)[0])


def writes_over(model, hold):
    """Whether the next backward writes over what is held of a gradient, of which nothing else is kept."""
    grad = step(model)[0]
    place, before, kept = grad.data_ptr(), grad.clone(), hold(grad)
    del grad
    model.zero_grad()
    gc.collect()
    again = step(model, IDS + 1)[0].data_ptr() == place
    return again or (isinstance(kept, torch.Tensor) and not torch.equal(kept, hold(before)))


HELD = {
    "the gradient": lambda g: g,
    "a view of it": lambda g: g[3:5],
    "its values in numpy": lambda g: torch.from_numpy(g.numpy()),
    "memory of its storage": lambda g: torch.empty(0).set_(g.untyped_storage(), 0, g.shape),
}


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
@pytest.mark.parametrize("hold", [*HELD.values(), *SEEN.values()], ids=[*HELD, *SEEN])
def test_a_gradient_whose_memory_is_held_is_left_alone(hold):
    assert not writes_over(converted(), hold)


def test_shared_or_resized_memory_is_not_taken():
    model = converted()
    grad = step(model)[0]
    grad.share_memory_()
    shared = grad.data_ptr()
    del grad
    model.zero_grad()
    assert step(model)[0].data_ptr() != shared
    model.bag.weight.grad.untyped_storage().resize_(0)
    model.zero_grad()
    torch.testing.assert_close(step(model)[0], step(converted(OFF))[0])


def test_control_memory_that_somebody_has_is_seen(monkeypatch):
    monkeypatch.setattr(gradient_buffers, "is_free", lambda own: True)
    assert writes_over(converted(), lambda g: g)


def test_gradients_add_up():
    model, plain = converted(), converted(OFF)
    for one in (model, plain):
        loss = one(IDS).square().sum()
        loss.backward(retain_graph=True)
        loss.backward()
        step(one, IDS + 1)
    torch.testing.assert_close([p.grad for p in model.parameters()], [p.grad for p in plain.parameters()])


def test_a_table_may_be_updated_before_the_backward():
    model = converted()
    loss = model(IDS).square().sum()
    with torch.no_grad():
        model.bag.weight.mul_(2)
    loss.backward()
    torch.testing.assert_close(model.bag.weight.grad, step(converted(OFF))[0])


def test_threads_do_not_share_memory():
    model = converted()
    want = [g.clone() for g in step(model)]
    model.zero_grad()

    def run():
        for _ in range(20):
            found = torch.autograd.grad(model(IDS).square().sum(), list(model.parameters()))
            assert all(map(torch.equal, found, want))

    in_threads(run, run, run)


def test_it_is_given_back_with_the_last_model_that_has_asked_for_it():
    models = [converted(), converted()]
    for model in models:
        step(model)
        model.zero_grad()
    for model in models:
        assert {t.numel() for t in POOL.tensors} == {ROWS * WIDTH}
        amp_graph.revert(model)
    assert not POOL.tensors


@pytest.mark.parametrize("options", [{"mode": "mean"}, {"mode": "max"}, {"sparse": True}, {"scale_grad_by_freq": True}])
def test_other_bags_are_left_alone(options):
    model = converted(**options)
    step(model)
    assert len(rewritten(model)) == 2  # of the words


@pytest.mark.parametrize(
    ("policy", "compile"),
    [("bf16,lists=autocast_cpu", "eager"), ("bf16", "aot_eager")],
)
def test_where_it_does_not_run(policy, compile):
    model = amp_graph.convert(Tables(), policy, compile=compile)
    step(model)
    assert not rewritten(model)


def test_frozen_tables_and_calls_without_gradients():
    model = converted()
    with torch.no_grad():
        model(IDS)
    model.requires_grad_(False)
    model.head.requires_grad_()
    model(IDS).sum().backward()
    assert not rewritten(model)


@layers(lambda tied: words_and_head(ROWS, WIDTH, tied), seed=0)
def Tied(self, ids):
    """Words whose table is the head as well, or has a copy of its own for that."""
    return self.head(self.words(ids))


@pytest.mark.parametrize("tied", [True, False])
def test_no_memory_is_kept_beside_the_sum_of_a_tied_tables_gradients(tied):
    ours, plain = (amp_graph.convert(Tied(tied), policy) for policy in ("bf16", OFF))
    for turn in range(2):
        for model in (ours, plain):
            model.zero_grad()
            model((IDS[:1, :2] + turn) % ROWS).square().mean().backward()
        torch.testing.assert_close(
            [p.grad for p in ours.parameters()], [p.grad for p in plain.parameters()], rtol=1e-5, atol=1e-8
        )
    assert len(POOL.tensors) == (not tied)
    assert ("another operation reads the table" in amp_graph.report(ours).text(skipped=True)) == tied


# -- compiled models --------------------------------------------------------------------------------------


def gradients(model, ids):
    model(ids).square().sum().backward()
    found = [p.grad for p in model.parameters()]
    model.zero_grad(set_to_none=True)
    return found


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
def test_compiled_gradients_stay_and_their_memory_is_used_again():
    ours = amp_graph.convert(Tables(reads=1), "bf16", compile="inductor")
    plain = amp_graph.convert(Tables(reads=1), "bf16,skip=reuse_embedding_gradients", compile="inductor")
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
def test_a_step_uses_one_memory_for_all_tables_of_a_shape(compile):

    def trained(policy):
        model = Tables(reads=1)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        step = amp_graph.TrainStep(model, lambda y: y.square().sum(), optimizer, policy, compile=compile)
        losses = [step((IDS + turn) % ROWS).detach() for turn in range(3)]
        return [*losses, *model.parameters()], len(POOL.tensors), step.graph_text()

    ours, kept, text = trained("bf16")
    plain, none, _ = trained(OFF)
    assert text.count("amp_graph.table_gradient") == 2
    assert 1 <= kept <= 2
    assert none == 0
    torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-5)
