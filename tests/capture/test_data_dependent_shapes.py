"""Sizes that depend on data: rows that a mask selects, slices up to a computed number, edges of a graph."""

import contextlib
import copy
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

import amp_graph
from amp_graph.errors import AmpGraphWarning
from amp_graph.passes.torch_compat import fake
from amp_graph.passes.torch_compat.fake import FakeTensorMode, concrete_size
from tests.by_hand import descend, twins
from tests.layers import forward_of, layers
from tests.warned import without_warnings

WIDTH, ROWS = 16, 12


def masks(m, x, kinds):
    """Rows that a mask selects, and what follows them."""
    h = m.first(x)
    rows = h[kinds > 0]
    table = F.relu(h).nonzero()
    total = torch.zeros_like(h)
    for kind, expert in enumerate(m.experts):
        (routed,) = torch.where(kinds == kind)
        total = total.index_add(0, routed, expert(h[routed]).to(h.dtype))
    return [
        m.second(rows)[:, 0],
        m.second(rows[None].expand(3, -1, -1)),
        m.second(m.norm(rows).softmax(-1)),
        torch.cat([m.second(rows), rows, h]),
        m.second(h[table[:, 0]]),
        m.second(total),
        h.masked_scatter((kinds > 0)[:, None], m.second(rows).to(h.dtype)),
    ]


def lengths(m, x, kinds):
    """Slices and repetitions of computed lengths, and operators whose results have one."""
    h = m.first(x)
    count = int((kinds > 0).sum())
    groups, places, counts = torch.unique(kinds, return_inverse=True, return_counts=True)
    first, rest = torch.split(h, [count, ROWS - count])
    return [
        m.second(h[:count]),
        m.second(h[count:]),
        m.second(h[-count:]),
        m.second(h[: groups.numel()]),
        m.second(h.view(3, 4, WIDTH)[:, : kinds.max()]),
        m.second(h.new_zeros(groups.numel(), WIDTH).index_add(0, places, h)) / counts[:, None],
        m.second(torch.repeat_interleave(h, kinds, dim=0)),
        m.second(h[torch.arange(count)]),
        m.second(first).sum(0) + m.second(rest).sum(0),
        m.second(torch.tensor_split(h, torch.tensor([2, 5]))[1]),
        m.second(torch.masked_select(h[:1], (kinds > 0)[:, None]).view(-1, WIDTH)),  # the mask is the larger one
        torch.masked_select(h[:, :1], h > 0).sum(),
    ]


def attends(m, x, kinds):
    """Attention of the rows that a mask selects."""
    rows = m.first(x)[kinds > 0][None]
    return [m.attention(rows, rows, rows)[0]]


def messages(m, x, kinds):
    """A SchNet: an edge where two atoms are near, its filter from their distance, messages added up by atom."""
    places = x[:, :3]
    far = (places[:, None] - places[None]).norm(dim=-1)
    source, into = (far < 1.5).nonzero().t()
    spread = torch.exp(-((far[source, into][:, None] - torch.linspace(0, 2, WIDTH)) ** 2))
    weights = F.softplus(m.second(spread))
    h = m.first(x)
    sent = h[source] * weights
    return [m.second(F.silu(torch.zeros_like(h).index_add(0, into, sent.to(h.dtype))))]


@layers(
    lambda program, own_loss=False: dict(
        first=nn.Linear(WIDTH, WIDTH),
        second=nn.Linear(WIDTH, WIDTH),
        norm=nn.LayerNorm(WIDTH),
        attention=nn.MultiheadAttention(WIDTH, 2, batch_first=True),
        experts=nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3)),
        program=program,
        own_loss=own_loss,
    ),
    seed=0,
)
def Model(self, x, kinds):
    """Layers for the programs above, which return tensors of sizes that depend on ``kinds``."""
    found = self.program(self, x, kinds)
    return loss_of(found) if self.own_loss else found


def loss_of(found):
    return sum((t.float() ** 2).sum() + t.float().sum() for t in found) / 10


def batches():
    """Some rows selected, none, and one."""
    drawn = torch.Generator().manual_seed(3)
    x, none = torch.randn(ROWS, WIDTH, generator=drawn), torch.zeros(ROWS, dtype=torch.long)
    one = none.clone()
    one[4] = 1
    return [(x, torch.randint(0, 3, (ROWS,), generator=drawn)), (x, none), (x, one)]


def results(model, batch):
    """Return outputs and gradients of one call."""
    model.zero_grad(set_to_none=True)
    found = model(*batch)
    loss_of(found).backward()
    return [t.detach() for t in found] + [p.grad.clone() for p in model.parameters() if p.grad is not None]


def error(found, expected):
    return ((found.double() - expected.double()).norm() / (expected.double().norm() + 1e-6)).item()


def check(ours, exact, baseline):
    """Let every tensor be as near to the exact one as autocast's, within a few roundings."""
    assert [t.shape for t in ours] == [t.shape for t in exact]
    for found, expected, other in zip(ours, exact, baseline, strict=True):
        assert error(found, expected) <= 2 * error(other, expected) + 0.01


def as_near_as_autocast(model, given, policy):
    """Check calls of a converted copy, which is returned."""
    ours = amp_graph.convert(copy.deepcopy(model), policy=policy)
    for batch in given:
        with torch.autocast("cpu", getattr(torch, "float16" if policy == "fp16" else "bfloat16")):
            baseline = results(model, batch)
        check(results(ours, batch), results(model, batch), baseline)
    return ours


@pytest.mark.parametrize("program", [masks, lengths, messages, attends])
def test_values_and_gradients_are_as_near_as_autocasts(program):
    assert len(amp_graph.report(as_near_as_autocast(Model(program), batches(), "bf16")).graphs) == 1


def few(m, x, kinds):
    """A mask, a slice, and an operator."""
    h = m.first(x)
    rows = h[kinds > 0]
    return [
        m.second(rows)[:, 0],
        m.second(rows[None].expand(3, -1, -1)),
        h[: int(kinds.sum())],
        h[: len(kinds.unique())],
    ]


@pytest.mark.parametrize("policy", ["fp16", "bf16,accuracy=1.2"])
def test_every_policy_plans_them(policy):
    as_near_as_autocast(Model(few), batches()[:1], policy)


def layouts(m, x, kinds):
    """What backward of products and running sums asks the sizes of."""
    rows = m.first(x)[kinds > 0]
    scores = (m.second(rows) @ rows.t() / 4).softmax(-1)
    return [
        scores @ rows,
        rows.cumsum(0),
        m.second(m.first(x).t()[:, kinds > 0].t()),
        m.second(F.pad(rows, (0, 0, 0, 3))),
    ]


def after_steps(program, policy=None, context=contextlib.nullcontext):
    """Return the losses of a few steps, and how far each parameter went."""
    model = Model(program, own_loss=True)
    start = [p.detach().clone() for p in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    step = amp_graph.TrainStep(model, None, optimizer, policy=policy) if policy else None
    losses = []
    for batch in batches():
        if step is not None:
            losses.append(step(batch))
            continue
        with context():
            losses.append(model(*batch))
        descend(optimizer, losses[-1])
    return [loss.detach() for loss in losses], [p.detach() - s for p, s in zip(model.parameters(), start, strict=True)]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("program", [masks, lengths, messages, layouts])
def test_a_step_is_one_graph(program):
    ours, exact = after_steps(program, "bf16"), after_steps(program)
    baseline = after_steps(program, context=lambda: torch.autocast("cpu", torch.bfloat16))
    for found, expected, other in zip(ours, exact, baseline, strict=True):
        check(found, expected, other)


@layers(lambda: dict(layer=nn.Linear(WIDTH, WIDTH)), seed=0)
def Listed(self, x, kinds):
    """Splits rows by counts whose number itself depends on data: no graph has them."""
    parts = self.layer(x).split(torch.bincount(kinds, minlength=3).tolist())
    return torch.stack([part.float().sum(0) for part in parts])


def test_what_is_no_graph_runs_all_the_same_and_a_step_says_what_to_do():
    (model, ours), batch = twins(Listed), batches()[0]
    with without_warnings():
        assert error(ours(*batch), model(*batch)) < 0.02
    assert "data-dependent" in amp_graph.report(ours).text()
    step = amp_graph.TrainStep(model, lambda out: out.sum(), torch.optim.SGD(model.parameters(), lr=0.1), policy="bf16")
    with pytest.warns(AmpGraphWarning) as told:
        assert error(step(batch), ours(*batch).sum()) < 0.02
    assert any("not one graph" in str(one.message) and "amp_graph.convert(model)" in str(one.message) for one in told)


@forward_of(Listed)
def Shared(self, x, kinds):
    """Returns a result of a layer, its conversion to bf16, a detached alias, and views."""
    h = torch.cat(self.layer(x).split(torch.bincount(kinds, minlength=3).tolist()) and [self.layer(x)])
    return h, h.bfloat16(), h.detach(), h, h.view(-1), h.t()[1:], h.detach()[:, 2:]


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.filterwarnings("ignore:amp_graph")
def test_results_of_a_later_call_without_graphs_keep_dtypes_and_shared_memory(grad):
    model, ours = twins(Shared)
    for batch in batches()[:3]:
        with torch.set_grad_enabled(grad):
            found, exact = ours(*batch), model(*batch)
        assert [(t.dtype, t.requires_grad) for t in found] == [(t.dtype, t.requires_grad) for t in exact]
        assert all(error(a, b) < 0.02 for a, b in zip(found, exact, strict=True))
        assert found[0] is found[3]
        assert found[1].data_ptr() != found[0].data_ptr()
        for i, where in (2, found[0]), (4, found[0].view(-1)), (5, found[0].t()[1:]), (6, found[0][:, 2:]):
            assert (found[i].data_ptr(), found[i].stride()) == (where.data_ptr(), where.stride()), "an alias or view"
        if grad:
            runs = ((found, ours), (exact, model))
            grads = [torch.autograd.grad(t[0].sum() + t[5].cos().sum(), m.layer.weight)[0] for t, m in runs]
            assert error(*grads) < 0.02


@forward_of(Listed)
def Bootstraps(self, x, kinds):
    """Reads its weight without gradients first: autocast keeps such casts."""
    with torch.no_grad():
        target = self.layer(x)
    return (self.layer(x.roll(torch.bincount(kinds, minlength=3).tolist()[0], 0)) - target,)


@pytest.mark.filterwarnings("ignore:amp_graph")
def test_weights_that_calls_without_graphs_read_without_gradients_first_get_theirs():
    model, ours = twins(Bootstraps)
    for batch in batches():
        pairs = zip(results(ours, batch), results(model, batch), strict=True)
        assert all(error(found, exact) < 0.03 for found, exact in pairs)


@layers(lambda mode: dict(mode=mode), base=Listed)
def Halved(self, x, kinds):
    """Returns half precision in one mode alone."""
    h = self.layer(x.roll(torch.bincount(kinds, minlength=3).tolist()[0], 0))
    return h.half() if self.training is self.mode else h


@pytest.mark.parametrize("mode", [True, False])
@pytest.mark.filterwarnings("ignore:amp_graph")
def test_results_of_later_calls_without_graphs_have_the_dtypes_of_their_mode(mode):
    model, ours = twins(partial(Halved, mode))
    for training in (True, False, True, False):
        for batch in batches()[:2]:
            found, exact = ours.train(training)(*batch), model.train(training)(*batch)
            assert found.dtype is exact.dtype
            assert error(found, exact) < 0.02


def test_comparing_sizes_adds_no_guard():
    mode = FakeTensorMode(shape_env=ShapeEnv())
    context = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC, DimDynamic.STATIC])
    x = mode.from_tensor(torch.zeros(4, 8), symbolic_context=context)
    with mode:
        y, known = x + 1, torch.zeros(4, 8)
    assert fake.same(x.shape, y.shape)
    assert fake.alike(x, y)
    assert not fake.same(x.shape, known.shape)  # equal now, and perhaps not at the next call
    assert fake.is_contiguous(x)
    assert not fake.is_contiguous(x.t())
    assert not mode.shape_env.guards


def test_a_size_that_depends_on_data_counts_as_the_most_it_can_be():
    mode = FakeTensorMode(shape_env=ShapeEnv())
    x = mode.from_tensor(torch.zeros(40, 8), static_shapes=True)
    with mode:
        rows = x[x[:, 0] > 0]
    assert concrete_size(rows.shape[0]) == 40
    assert concrete_size(rows.shape[0] * 2 + 1) == 81
    assert concrete_size(mode.shape_env.create_unbacked_symint()) == 4
    assert fake.depends_on_data(rows)
    assert not fake.depends_on_data(x)
    assert fake.is_contiguous(rows)
    assert not fake.same(rows.shape, x.shape)
