"""Images in channels_last from the first convolution to the last: the same numbers in the same places."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import amp_graph
from amp_graph.capture.conversion import conversion_of
from amp_graph.passes.layout import channels_last
from amp_graph.passes.layout.channels_last import ChannelsLast
from amp_graph.passes.layout.memory_format import Layouts, is_channels_last
from tests.passes.drawn import drawn
from tests.passes.graphs import (
    Function,
    assert_left_alone,
    capture_function,
    errors_of,
    multiply_bf16,
    run_step,
    with_and_without,
)


@pytest.fixture(autouse=True)
def _a_machine_where_it_is_profitable(monkeypatch):
    multiply_bf16(monkeypatch, multiplies=True)


X = drawn(2, 4, 6, 6, seed=1)
STATE = {"w": drawn(8, 4, 3, 3, seed=2) / 6, "v": drawn(8, 8, 3, 3, seed=3) / 8, "b": drawn(8, seed=4)}
STATE["u"] = drawn(1, 8, 2, 2, seed=5) / 4


def convs(s, x):
    return F.conv2d(F.relu(F.conv2d(x, s.w, s.b, padding=1)), s.v, padding=1)


def residual(s, x):
    h = F.relu(F.conv2d(x, s.w, padding=1))
    h = h + F.conv2d(h, s.v, padding=1)
    return F.max_pool2d(h, 2).mean((2, 3))


def viewed(s, x):
    h = convs(s, x)
    return h.view(2, -1), h.flatten(2).transpose(1, 2)


def padded(s, x):
    h = F.pad(F.conv2d(x, s.w), (1, 1, 1, 0))
    h = F.pad(F.pad(F.conv2d(h, s.v), (1, 2, 0, 1), mode="reflect"), (1, 1, 1, 1), mode="replicate")
    return F.pixel_unshuffle(F.pixel_shuffle(F.conv2d(h, s.v), 2), 2).mean((2, 3))


def normed(s, x):
    h = F.batch_norm(convs(s, x), None, None, s.b, s.b, training=True)
    return F.adaptive_avg_pool2d(F.group_norm(h, 2), 1).flatten(1)


def written(s, x):
    h = F.conv2d(x, s.w, padding=1)
    h += s.b.view(1, -1, 1, 1)
    return F.conv2d(h.mul_(2).relu_(), s.v, padding=1)


def joined(s, x):
    h = F.conv2d(x, s.w, padding=1)
    h = torch.cat([F.interpolate(F.max_pool2d(h, 2), scale_factor=2), h], 1)
    return F.conv2d(F.conv2d(h[:, :8], s.v, padding=1) + h[:, 8:], s.v)


def seen_by_view(s, x):
    h = F.conv2d(x, s.w, padding=1)
    flat = h.view(2, -1)
    h.mul_(2)  # flat sees it
    return F.conv2d(h, s.v, padding=1), flat


def written_by_view(s, x):
    h = F.conv2d(x, s.w, padding=1)
    h.view(2, -1).mul_(2)
    return F.conv2d(h, s.v, padding=1)


def viewed_once_written(s, x):
    """An activation in place, and then attention over places, say: the view sees all that was written."""
    h = F.conv2d(F.conv2d(x, s.w, padding=1).add_(1).relu_(), s.v, padding=1).relu_()
    return F.conv2d(h * h.view(2, 8, -1).softmax(-1).view(h.shape), s.v, padding=1)


def written_in_part(s, x):
    h = F.conv2d(x, s.w, padding=1)
    h[:, 0] = 0
    return F.conv2d(h, s.v, padding=1)


def split_up(s, x):
    """CSPNet, Res2Net: a part is convolved, and laid beside the other."""
    h = F.conv2d(x, s.w, padding=1)
    a, b = h.chunk(2, 1)
    c, d = torch.split(torch.cat([a, F.conv2d(b, s.w, padding=1)], 1), [8, 4], 1)
    return (F.conv2d(c * 2, s.v, padding=1)[:, :4] + d.sigmoid()).mean((2, 3))


def whole_part(s, x):
    """GhostNet: as many channels as there are, and written then."""
    h = F.conv2d(x, s.w, padding=1)
    part = h[:, :8]
    part += F.conv2d(x, s.w, padding=1)
    return F.conv2d(h, s.v).mean((2, 3)) + part.mean((2, 3))[:, :8]


def every_second_place(s, x):
    h = F.conv2d(x, s.w, padding=1)
    return F.conv2d(torch.cat([h[:, :4, ::2, ::2], h[:, 4:, 1::2, 1::2]], 1), s.v, padding=1).mean((2, 3))


def part_viewed(s, x):
    h = convs(s, x)
    return h[:, 2:4].view(2, -1) * 2, F.conv2d(h, s.v)


def part_written(s, x):
    h = F.conv2d(x, s.w, padding=1)
    h[:, :4].mul_(2)
    h.narrow(1, 4, 2).mul_(3)
    return F.conv2d(h, s.v, padding=1)


PARTS = {f.__name__: f for f in (split_up, whole_part, every_second_place, part_viewed, part_written)}
CASES = {f.__name__: f for f in (convs, residual, viewed, padded, normed, written, joined)}
CASES |= {f.__name__: f for f in (seen_by_view, written_by_view, viewed_once_written, written_in_part)} | PARTS


def passed(function, x=X, policy="bf16", state=STATE):
    return with_and_without(ChannelsLast(), capture_function(function, x, **state), policy)


def against_fp64(function):
    """The largest ratio of our errors to those without the pass, outputs and gradients."""
    plain, ours, given, result = passed(function)
    double = [a.detach().double().requires_grad_(a.requires_grad) for a in given]
    exact = run_step(capture_function(function, X, **STATE).gm, tuple(double))
    pairs = zip(errors_of(run_step(ours, given), exact), errors_of(run_step(plain, given), exact), strict=True)
    return max(a / b for a, b in pairs), result


class Seen(torch.fx.Interpreter):
    """Notes which values lie in channels_last when the graph runs."""

    def __init__(self, gm):
        super().__init__(gm)
        self.found = {}

    def run_node(self, n):
        out = super().run_node(n)
        self.found[n] = is_channels_last(out)
        return out


@pytest.mark.sampled(2)
@pytest.mark.onednn  # a convolution of torch's own adds up in bf16, in an order that the layout decides
@pytest.mark.parametrize("name", CASES)
def test_as_exact_as_without(name):
    ratio, result = against_fp64(CASES[name])
    assert ratio <= 1.1
    assert result.changes


SHARED = {"split_up", "whole_part", "padded"}  # all that they convolve with twice


@pytest.fixture(params=[True])
def weights_too(request, monkeypatch):
    """Whether kernels want weights in the layout as well."""
    monkeypatch.setattr(channels_last, "channels_last_weights_are_profitable", lambda device: request.param)


@pytest.mark.onednn
@pytest.mark.sampled(2)
@pytest.mark.usefixtures("weights_too")
@pytest.mark.parametrize("name", CASES)
def test_weights_are_cast_into_the_layout_where_kernels_want_that(name):
    ratio, _ = against_fp64(CASES[name])
    assert ratio <= 1.1
    _, ours, given, _ = passed(CASES[name])
    convolutions = [n for n in ours.graph.nodes if n.target is torch.conv2d and is_channels_last(n.args[0].meta["val"])]
    weights = [n.args[1] for n in convolutions if len(n.args[1].users) == 1]
    assert weights or name in SHARED
    assert all(w.kwargs == {"memory_format": torch.channels_last} and w.target == "to" for w in weights)
    with torch.no_grad():
        seen = Seen(ours)
        seen.run(*given)
    assert all(seen.found[w] and is_channels_last(w.meta["val"]) for w in weights)


@pytest.mark.sampled(2)
@pytest.mark.usefixtures("weights_too")
@pytest.mark.parametrize("weights_too", [False, True], indirect=True)
@pytest.mark.parametrize("name", CASES)
def test_outputs_and_gradients_keep_their_strides(name):
    _, ours, given, _ = passed(CASES[name])
    plain = CASES[name](Function(None, **STATE), X)
    for a, b in zip(torch.utils._pytree.tree_leaves(ours(*given)), torch.utils._pytree.tree_leaves(plain), strict=True):
        assert a.stride() == b.stride()
    model = amp_graph.convert(Function(CASES[name], **STATE), "bf16")
    sum(t.square().sum() for t in torch.utils._pytree.tree_leaves(model(X))).backward()
    assert all(p.grad is None or p.grad.stride() == p.stride() for p in model.parameters())


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", CASES)
def test_the_graph_knows_the_layouts_that_come_about(name):
    _, ours, given, _ = passed(CASES[name])
    seen = Seen(ours)
    with torch.no_grad():
        seen.run(*given)
    assert any(seen.found.values())
    for node, found in seen.found.items():
        assert found == is_channels_last(node.meta.get("val")), node


@pytest.mark.parametrize("name", ["convs", "residual", "padded", "normed", "written"])
def test_one_change_of_layout_at_each_boundary(name):
    _, _, _, result = passed(CASES[name])
    actions = [c.action for c in result.changes]
    assert actions.count("to channels_last") == 1
    ends = {"residual", "padded", "normed"}  # in a single place a channel
    assert actions.count("back to contiguous") == (name not in ends)


def is_wrong(function):
    try:
        return against_fp64(function)[0] > 3
    except RuntimeError:  # a view of channels_last memory is refused
        return True


@pytest.mark.parametrize("name", ["seen_by_view", "written_by_view"])
def test_control_a_write_through_a_view_would_be_lost(name, monkeypatch):
    monkeypatch.setattr(Layouts, "of", lambda gm, memory: Layouts(frozenset(), memory))
    assert is_wrong(CASES[name])


@pytest.mark.parametrize("control", [False, True])
def test_parts_that_are_returned_keep_their_strides(control, monkeypatch):
    def part_returned(s, x):
        h = convs(s, x)
        return h[:, 2:4], F.conv2d(h, s.v)

    if control:
        monkeypatch.setattr(Layouts, "_may_show_a_part", lambda self, node: True)
    plain, ours, given, result = passed(part_returned, policy="bf16,keep_outputs=false")
    same = ours(*given)[0].stride() == plain(*given)[0].stride()
    assert result.changes
    assert same != control


def test_control_a_part_that_is_written_must_be_of_the_same_memory(monkeypatch):
    monkeypatch.setattr(Layouts, "_may_show_a_part", lambda self, node: True)
    assert is_wrong(part_written)


def test_control_without_the_way_back_a_view_is_refused(monkeypatch):
    _, ours, given, _ = passed(viewed)
    for node in list(ours.graph.nodes):
        if node.target == "contiguous" and node.kwargs == {"memory_format": torch.contiguous_format}:
            node.replace_all_uses_with(node.args[0])
    ours.recompile()
    with pytest.raises(RuntimeError, match="view"):
        ours(*given)


def test_random_numbers_go_to_the_same_elements():
    plain, ours, given, result = passed(
        lambda s, x: F.conv2d(F.dropout(F.conv2d(x, s.w, padding=1), 0.5), s.v, padding=1)
    )
    assert result.changes
    a, b = run_step(ours, given).outputs[0], run_step(plain, given).outputs[0]
    assert (a - b).norm() < 0.02 * b.norm()


LEFT = {
    "one convolution": lambda s, x: F.conv2d(x, s.w).flatten(1),
    "the user's own layout": lambda s, x: convs(s, x.contiguous(memory_format=torch.channels_last)),
    "the user's own autocast": torch.autocast("cpu", torch.bfloat16)(convs),
}


@pytest.mark.parametrize("name", LEFT)
def test_what_is_left_alone(name):
    assert_left_alone(passed(LEFT[name]))


def test_sizes_that_vary_are_not_guarded():
    function = Function(lambda s, x: convs(s, x).view(x.shape[0], -1), **STATE)
    model = amp_graph.convert(function, "bf16", dynamic=True)
    assert all(model(drawn(batch, 4, 6, 6)).shape == (batch, 8 * 36) for batch in (2, 3, 5))
    assert len(conversion_of(model).graphs) == 1


def test_a_machine_where_it_is_not_profitable(monkeypatch):
    multiply_bf16(monkeypatch, multiplies=False)
    _, _, _, result = passed(convs)
    assert not result.changes
    assert "not profitable" in result.skips[0].reason


def test_images_of_one_channel_become_channels_last_behind_their_first_convolution():
    """Both layouts of one channel are the same memory: the first convolution gives contiguous images."""
    grey = drawn(2, 1, 6, 6, seed=5)
    _, ours, given, _ = passed(convs, grey, state={**STATE, "w": drawn(8, 1, 3, 3, seed=2) / 3})
    seen = Seen(ours)
    seen.run(*given)
    assert [seen.found[n] for n in ours.graph.nodes if "conv2d" in n.name] == [False, True]
    (relu,) = [n for n in ours.graph.nodes if n.name == "relu"]
    assert seen.found[relu]  # it is saved for backward, in this layout alone


def test_gradients_lie_as_their_weights():
    """A contiguous weight, and one that was channels_last before."""
    model = nn.Sequential(nn.Conv2d(16, 96, 3, padding=1), nn.ReLU(), nn.Conv2d(96, 160, 3, padding=1, bias=False))
    model[0].weight.data = model[0].weight.data.contiguous(memory_format=torch.channels_last)
    amp_graph.convert(model, "bf16")
    for _ in range(2):
        out = model(torch.randn(4, 16, 12, 12).contiguous(memory_format=torch.channels_last))
        out.square().mean().backward()
        assert is_channels_last(out)
    assert all(p.grad.stride() == p.stride() for p in model.parameters())
