"""What is laid side by side is cast on its way there: the same bits, forward and backward, and one copy less."""

import pytest
import torch
from torch.autograd import forward_ad

import amp_graph
from amp_graph.passes.layout import sink_casts_into_concat
from amp_graph.passes.layout.sink_casts_into_concat import SinkCastsIntoConcat, joined_low
from amp_graph.passes.manager import run_passes
from amp_graph.policy import Policy
from tests.passes.graphs import capture_function, differences, passes_for, run_step

X = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
W = torch.randn(8, 8, generator=torch.Generator().manual_seed(2)) / 3
V = torch.randn(16, 8, generator=torch.Generator().manual_seed(3)) / 3


@pytest.fixture(autouse=True)
def small_parts_are_worth_it(monkeypatch):
    monkeypatch.setattr(sink_casts_into_concat, "casting_parts_is_profitable", lambda device, elements: True)


JOINED = {
    "low and full": lambda s, x: torch.cat([x, x @ s.w], 1) @ s.v,
    "full": lambda s, x: torch.cat([x, x * 2], -1) @ s.v,
    "rows": lambda s, x: torch.cat([x @ s.w, x, x[:1]]) @ s.w,
    "stacked": lambda s, x: torch.stack([x @ s.w, x, x], 1) @ s.w,
    "stacked behind": lambda s, x: torch.stack([x, x @ s.w], -1).transpose(1, 2) @ s.w,
    "parameters": lambda s, x: torch.cat([s.w, x]) @ s.w,
    "twice the same": lambda s, x: torch.cat([x, s.w, x]) @ s.w,
}
LEFT_ALONE = {
    "cast before it grows": lambda s, x: torch.cat([x, x], 1) @ s.v,
    "low": lambda s, x: torch.cat([x @ s.w, x @ s.w], 1) @ s.v,
    "read in full": lambda s, x: (h := torch.cat([x, x @ s.w], 1)) @ s.v + h.exp().sum(),
    "of whole numbers": lambda s, x: torch.cat([x, x.argmax(1, keepdim=True).expand(4, 8)], 1) @ s.v,
    "read by nobody low": lambda s, x: torch.cat([x, x * 2], 1).exp(),
}


def passed(function):
    """Return the graph before and after the pass, what it is given, and what was done."""
    graph, passes = capture_function(function, X, w=W, v=V), passes_for(Policy.parse("bf16"), "cpu", eager=True)
    before = passes[: next(i for i, p in enumerate(passes) if isinstance(p, SinkCastsIntoConcat))]
    plain, ours = (graph.through(before)[0] for _ in range(2))
    (done,) = run_passes(ours, [SinkCastsIntoConcat()], checked=True)
    return plain, ours, graph.given, done.result


@pytest.mark.parametrize("name", JOINED)
def test_no_bit_changes_forward_or_backward(name):
    plain, ours, given, result = passed(JOINED[name])
    assert [c.action for c in result.changes] == ["cast in parts"]
    assert not any(n.target in (torch.cat, torch.stack) for n in ours.graph.nodes)
    assert not differences(run_step(ours, given), run_step(plain, given))


@pytest.mark.parametrize("name", LEFT_ALONE)
def test_all_else_is_left_alone(name):
    assert not passed(LEFT_ALONE[name])[3].changes


def test_small_ones_are_left_alone(monkeypatch):
    monkeypatch.undo()
    assert not passed(JOINED["stacked"])[3].changes


def test_what_is_written_meanwhile_is_read_before():
    def function(s, x):
        part = x * 2
        whole = torch.cat([part, part], 1)
        part.add_(1)
        return whole @ s.v + part

    plain, ours, given, _ = passed(function)
    assert not differences(run_step(ours, given), run_step(plain, given))


def test_control_gradients_of_the_wrong_part_differ(monkeypatch):
    backward = sink_casts_into_concat._JoinedLow.backward
    monkeypatch.setattr(
        sink_casts_into_concat._JoinedLow, "backward", staticmethod(lambda ctx, grad: backward(ctx, grad.flip(ctx.dim)))
    )
    plain, ours, given, _ = passed(JOINED["stacked"])
    assert differences(run_step(ours, given), run_step(plain, given))


def test_second_derivatives():
    a, b = (torch.randn(3, 4, dtype=torch.float64, requires_grad=True) for _ in range(2))
    for stacks in (False, True):
        assert torch.autograd.gradgradcheck(lambda a, b, s=stacks: joined_low([a, b], 1, s, torch.float64) ** 2, (a, b))


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
def test_transforms_and_forward_mode_get_the_plain_operations():
    a, b = X, X @ W
    whole = torch.stack([a, b], 1).bfloat16()
    mapped = torch.func.vmap(lambda a, b: joined_low([a, b], 0, True, torch.bfloat16))(a, b)
    assert torch.equal(mapped, whole)
    with forward_ad.dual_level():
        found = joined_low([forward_ad.make_dual(a, a), b], 1, True, torch.bfloat16)
        tangent = forward_ad.unpack_dual(found).tangent
    assert torch.equal(tangent[:, 0], a.bfloat16())
    assert not tangent[:, 1].any()


class Features(torch.nn.Module):
    """Embeddings beside what a layer makes, as recommendation models have them."""

    def __init__(self):
        super().__init__()
        self.tables = torch.nn.ModuleList(torch.nn.EmbeddingBag(50, 8, mode="sum") for _ in range(3))
        self.first, self.last = torch.nn.Linear(8, 8), torch.nn.Linear(32, 1)

    def forward(self, x, places):
        parts = [self.first(x), *(table(places[:, i]) for i, table in enumerate(self.tables))]
        return self.last(torch.cat(parts, 1)).sum()


def test_a_model_trains_the_same():
    torch.manual_seed(0)
    ours, theirs = Features(), Features()
    theirs.load_state_dict(ours.state_dict())
    amp_graph.convert(ours, "bf16"), amp_graph.convert(theirs, "bf16,skip=sink_casts_into_concat")
    places = torch.randint(50, (4, 3, 5))
    for model in (ours, theirs):
        model(X, places).backward()
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(ours.parameters(), theirs.parameters(), strict=True))
    assert "joined_low(" in amp_graph.report(ours).graphs[0].text
