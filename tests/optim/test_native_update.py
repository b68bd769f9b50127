"""The update in one pass of compiled C against torch's kernels, operator by operator and over whole trainings."""

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import amp_graph
from amp_graph.errors import CaptureError, CompilerError
from amp_graph.optim.native_update import options_of, rule_of
from amp_graph.optim.native_update_ops import OPS, SOURCE, library
from amp_graph.optim.torch_fused_update import group_updates
from amp_graph.passes.native import jit_compiler
from amp_graph.passes.native.jit_compiler import load
from amp_graph.scaling.loss_scale import LossScale
from tests.step.test_train_step import (
    OPTIMIZERS,
    Net,
    Normalized,
    batches,
    build,
    by_hand,
    everything,
    parameters,
    same,
)

INF, NAN = float("inf"), float("nan")
LOWS = [torch.bfloat16, torch.float16]
RULES = OPTIMIZERS | {
    "maximize": (torch.optim.AdamW, {"maximize": True}),
    "small betas": (torch.optim.Adam, {"betas": (0.3, 0.5)}),
    "adagrad decay": (torch.optim.Adagrad, {"weight_decay": 0.01}),
    "amsgrad decay": (torch.optim.AdamW, {"amsgrad": True, "weight_decay": 0.1}),
}


@pytest.fixture(scope="module", autouse=True)
def folder(tmp_path_factory):
    """Compile anew, into a folder of the test run's own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(jit_compiler.FOLDER, str(tmp_path_factory.mktemp("compiled")))
        load.cache_clear()
        library.cache_clear()
        yield
    load.cache_clear()
    library.cache_clear()


def tensors(shapes, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in shapes]


class Pair:
    """The same parameters twice: updated in one pass, and by torch's kernel on widened gradients."""

    def __init__(self, name, shapes, low):
        kind, options = RULES[name]
        self.low = low
        self.ours, self.theirs = ([nn.Parameter(t) for t in tensors(shapes)] for _ in range(2))
        self.update, self.other = (
            group_updates(kind(params, **{"lr": 0.01, **options}), params)[0] for params in (self.ours, self.theirs)
        )
        self.lows = [p.detach().to(low) for p in self.ours]

    def step(self, grads, found_inf=None, clip=None, unscale=None, limit=None):
        counted = "step" in self.update.state_names()
        states = self.update.states[:-1] if counted else self.update.states
        steps = list(self.update.states[-1]) if counted else []
        lr, numbers = torch.tensor(0.01, dtype=torch.float64), list(range(len(self.ours)))
        flat = [t for kind in states for t in kind]
        options = options_of(self.update) | ({} if limit is None else {"clip_value": limit})
        given = (self.ours, grads, flat, steps, self.lows, numbers, lr, found_inf, unscale, clip)
        with torch.no_grad():
            OPS.one_pass_update_(*given, rule=rule_of(self.update, self.low), **options)
            wide = [g.float() for g in grads]
            for factor in (unscale, clip):
                wide = wide if factor is None else [g * factor for g in wide]
            wide = wide if limit is None else [g.clamp(-limit, limit) for g in wide]
            self.other.apply(self.theirs, wide, self.other.states, lr, found_inf)

    def pairs(self):
        yield from zip(self.ours, self.theirs, strict=True)
        for one, two in zip(self.update.states, self.other.states, strict=True):
            yield from zip(one, two, strict=True)

    def is_equal(self):
        return all(torch.equal(a, b) for a, b in self.pairs())

    def is_close(self):
        """To 8 last places of the largest element: gradients of 20 steps cancel in a sum."""
        return all((a - b).abs().max() <= 2.0**-20 * b.abs().max() for a, b in self.pairs())


# -- the operators ------------------------------------------------------------------------------------


@pytest.mark.sampled(5)
@pytest.mark.parametrize("low", LOWS)
@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("wide", [False, True], ids=["low", "fp32"])
@pytest.mark.compiled
def test_bit_for_bit_what_torchs_kernel_does(name, low, wide):
    pair = Pair(name, [(48, 32), (64,), (2, 3, 4, 4)], low)
    for seed in range(5):
        grads = tensors([p.shape for p in pair.ours], seed)
        pair.step([g if wide else g.to(low) for g in grads])
    assert pair.is_equal()
    assert same(pair.lows, [p.detach().to(low) for p in pair.ours])


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("size", [1, 7, 13, 31])
@pytest.mark.compiled
def test_the_last_elements_to_a_last_place(name, size):
    pair = Pair(name, [(size,), (33 - size,)], torch.bfloat16)
    for seed in range(20):
        pair.step([g.bfloat16() for g in tensors([p.shape for p in pair.ours], seed)])
    assert pair.is_close()


@pytest.mark.compiled
def test_a_wrong_rate_is_seen():
    """Control: the comparison above fails where one option differs in its third place."""
    pair = Pair("adamw", [(13,)], torch.bfloat16)
    pair.other.group["betas"] = (0.901, 0.999)
    pair.step([g.bfloat16() for g in tensors([(13,)])])
    assert not pair.is_close()


@pytest.mark.parametrize("low", LOWS)
@pytest.mark.compiled
def test_unscaled_clipped_and_held_in_torchs_order(low):
    pair = Pair("adamw", [(64, 48), (16,)], low)
    grads = [g.to(low) * 8 for g in tensors([(64, 48), (16,)], 3)]
    pair.step(grads, unscale=torch.tensor(1 / 3), clip=torch.tensor(0.77), limit=0.5)
    assert pair.is_equal()


@pytest.mark.compiled
def test_gradients_that_lie_otherwise_than_a_tracer_said():
    pair, other = (Pair("adamw", [(16, 48), (2, 16, 4, 4)], torch.bfloat16) for _ in range(2))
    grads = [g.bfloat16() for g in tensors([(16, 48), (2, 16, 4, 4)])]
    other.step(grads)
    pair.step([grads[0].t().contiguous().t(), grads[1].contiguous(memory_format=torch.channels_last)])
    assert same(everything_of(pair), everything_of(other))
    sums, wanted = torch.zeros(16, 48), grads[0].float()
    OPS.add_gradients_([sums], [grads[0].t().contiguous().t()], "sgd bf16")
    assert torch.equal(sums, wanted)


@pytest.mark.compiled
def test_several_threads_do_the_same():
    """Shares end in the middle of tensors; who computes an element changes no bit."""
    shapes = [(1000, 301), (7,), (513, 511)]
    pair, alone = Pair("adamw", shapes, torch.bfloat16), Pair("adamw", shapes, torch.bfloat16)
    grads = [g.bfloat16() for g in tensors(shapes, 1)]
    alone.step(grads)
    torch.set_num_threads(3)
    try:
        pair.step(grads)
        found = OPS.look_at_gradients(grads, "adam bf16")
    finally:
        torch.set_num_threads(1)
    assert same(everything_of(pair), everything_of(alone))
    torch.testing.assert_close(found[1], torch.cat([g.double().view(-1) for g in grads]).norm().float())


def everything_of(pair):
    return [a for a, _ in pair.pairs()] + pair.lows


@pytest.mark.parametrize("low", LOWS)
@pytest.mark.parametrize("value", [INF, -INF, NAN])
@pytest.mark.parametrize("place", [0, 500, -1])
@pytest.mark.compiled
def test_one_bad_element_is_found_wherever_it_is(low, value, place):
    grads = [g.to(low) for g in tensors([(37, 41), (64,), (13,)])]
    assert OPS.look_at_gradients(grads, f"adam {SHORT[low]}")[0] == 0
    for grad in grads:
        bad = [g.clone() for g in grads]
        spoiled = next(b for b, g in zip(bad, grads, strict=True) if g is grad)
        spoiled.view(-1)[min(place, grad.numel() - 1)] = value
        assert OPS.look_at_gradients(bad, f"adam {SHORT[low]}")[0] == 1


SHORT = {torch.bfloat16: "bf16", torch.float16: "fp16"}


@pytest.mark.compiled
def test_large_gradients_are_no_infinite_ones():
    huge = [torch.full((1000,), 3e38).bfloat16(), torch.full((1000,), 3e38)]
    found_inf, norm = OPS.look_at_gradients(huge, "adam bf16")
    assert found_inf == 0
    assert norm == INF


@pytest.mark.parametrize("low", LOWS)
@pytest.mark.compiled
def test_the_norm_is_that_of_fp64(low):
    grads = [*(g.to(low) for g in tensors([(300, 200), (5,)], 2)), *tensors([(77,)], 4)]
    wanted = torch.cat([g.double().view(-1) for g in grads]).norm()
    assert abs(OPS.look_at_gradients(grads, f"sgd {SHORT[low]}")[1] - wanted) <= 1e-7 * wanted


@pytest.mark.parametrize("low", LOWS)
@pytest.mark.compiled
def test_gradients_add_up_in_fp32(low):
    grads = [g.to(low) for g in tensors([(31, 17), (5,)])]
    sums = tensors([(31, 17), (5,)], 9)
    wanted = [s + g.float() for s, g in zip(sums, grads, strict=True)]
    OPS.add_gradients_(sums, grads, f"sgd {SHORT[low]}")
    assert same(sums, wanted)


@pytest.mark.parametrize("low", LOWS)
@pytest.mark.compiled
def test_copies_round_as_torch_does(low):
    """Every exponent, ties, subnormal numbers, overflow, and what is no number, through an update by nothing."""
    bits = torch.arange(-(2**31), 2**31, 65537 // 8, dtype=torch.int64).to(torch.int32)
    ties = torch.arange(-(2**31), 2**31, 2**15, dtype=torch.int64).to(torch.int32)
    values = torch.cat([bits, ties]).view(torch.float32)
    copy = torch.empty(values.shape, dtype=low)
    kept = values.clone()
    given = ([values], [torch.zeros(values.shape)], [], [], [copy], [0], torch.zeros((), dtype=torch.float64))
    OPS.one_pass_update_(*given, None, None, None, rule=f"sgd {SHORT[low]}")
    wanted = kept.to(low)
    assert torch.equal(copy.isnan(), wanted.isnan())
    assert torch.equal(copy.nan_to_num(), wanted.nan_to_num())


# -- whole trainings ----------------------------------------------------------------------------------


def close(one, two):
    return all(torch.allclose(a, b, 1e-4, 1e-6) for a, b in zip(one, two, strict=True))


class InVectors(nn.Module):
    """Every parameter has a multiple of 16 elements, which are all updated as torch's kernels do, bit for bit."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(8, 32), nn.LayerNorm(32), nn.Linear(32, 16)

    def forward(self, x):
        return self.second(F.gelu(self.norm(self.first(x))))


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("options", [{}, {"clip_value": 0.01}], ids=["plain", "clipped"])
@pytest.mark.parametrize("parts", [1, 4])
@pytest.mark.compiled
def test_100_steps_are_those_of_the_loop_by_hand(name, options, parts):
    kind, given = OPTIMIZERS[name]
    model, optimizer = build(InVectors, optimizer=kind, **given)
    more = {"micro_batches": parts, "update": "one_pass", **options}
    # The loop's products add their bias in another order than the fused ones.
    step = amp_graph.TrainStep(model, F.cross_entropy, optimizer, "bf16,skip=fuse_addmm_bias", **more)
    losses = [step(x, y).item() for x, y in batches(100, (8, 8))]
    other, theirs = build(InVectors, optimizer=kind, fused=True, **given)
    found = by_hand(other, theirs, "bf16", batches(100, (8, 8)), value=options.get("clip_value"), parts=parts)
    assert parts > 1 or losses == found
    assert same(parameters(model), parameters(other))
    assert "one_pass_update_" in step.graph_text()
    assert "_fused_" not in step.graph_text()
    assert "update: one pass" in amp_graph.report(step).text()


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.compiled
def test_clipped_to_a_norm_that_is_a_few_last_places_from_torchs(name):
    kind, given = OPTIMIZERS[name]
    model, optimizer = build(optimizer=kind, **given)
    step = amp_graph.TrainStep(model, F.cross_entropy, optimizer, "bf16", clip_norm=0.5, update="one_pass")
    losses = [step(x, y).item() for x, y in batches(10)]
    other, theirs = build(optimizer=kind, fused=True, **given)
    found = by_hand(other, theirs, "bf16", batches(10), clip=0.5)
    torch.testing.assert_close(losses, found, rtol=1e-3, atol=0)
    torch.testing.assert_close(parameters(model), parameters(other), rtol=1e-3, atol=1e-3)


@pytest.mark.compiled
def test_a_norm_below_the_limit_changes_nothing():
    found = []
    for clip in ({}, {"clip_norm": 1.0}):
        model, optimizer = build(optimizer=torch.optim.SGD)
        step = amp_graph.TrainStep(model, F.cross_entropy, optimizer, "bf16", update="one_pass", **clip)
        for x, y in batches(3):
            step(x, y)
        found.append(parameters(model))
    assert same(*found)
    assert 0.5 < step.grad_norm.item() < 0.8, "near to the limit, so that a factor above 1 would show"


@pytest.mark.sampled(3)
@pytest.mark.parametrize("policy", ["bf16", "fp16", "bf16-O2", "fp16-O2", "bf16,accuracy=fast"])
@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.SGD])
@pytest.mark.compiled
def test_a_few_steps_are_those_of_torchs_kernels(policy, optimizer):
    def trained(update):
        model, made = build(optimizer=optimizer)
        options = {"loss_scale": LossScale(2.0**10), "clip_norm": 0.5, "clip_value": 0.1, "update": update}
        step = amp_graph.TrainStep(model, F.cross_entropy, made, policy, **options)
        losses = torch.stack([step(x, y) for x, y in batches(5)])
        return losses, everything(model, made), step.weight_copies(), step.loss_scale.values()

    one, two = trained("one_pass"), trained("torch")
    torch.testing.assert_close(one[0], two[0], rtol=1e-5, atol=0)
    assert close(one[1], two[1])
    assert all(torch.allclose(a.float(), b.float(), 2e-2, 1e-3) for a, b in zip(one[2], two[2], strict=True))
    assert one[3] == two[3]


@pytest.mark.compiled
def test_copies_are_the_rounded_weights():
    model, optimizer = build()
    step = amp_graph.TrainStep(model, F.cross_entropy, optimizer, "bf16", update="one_pass")
    for x, y in batches(3):
        step(x, y)
    rounded = [p.detach().bfloat16() for p in model.parameters()]
    assert all(any(c.shape == r.shape and torch.equal(c, r) for r in rounded) for c in step.weight_copies())
    assert len(step.weight_copies()) == 4


@pytest.mark.sampled(6)
@pytest.mark.parametrize("policy", ["fp16", "fp16-O2"])
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("value", [INF, NAN])
@pytest.mark.compiled
def test_a_bad_step_changes_nothing(policy, name, first, value):
    kind, given = OPTIMIZERS[name]
    model, optimizer = build(optimizer=kind, **given)
    options = {"loss_scale": LossScale(2.0**8), "update": "one_pass"}
    step = amp_graph.TrainStep(model, F.cross_entropy, optimizer, policy, **options)
    x, y = next(batches(1))
    if not first:
        step(x, y)
    before, copies = everything(model, optimizer), [c.clone() for c in step.weight_copies()]
    bad = x.clone()
    bad[0, 0] = value
    step(bad, y)
    after = everything(model, optimizer)
    assert same(before, after[: len(before)])
    assert same(copies, step.weight_copies()[: len(copies)])
    assert not any(t.any() for t in after[len(before) :]), "state that was made is as new"
    assert step.skipped_steps == 1
    assert step.loss_scale.values()[0] == 2.0**7
    step(x, y)
    assert not same(before[: len(parameters(model))], parameters(model)), "control: a good step does"


class Spoils(Net):
    """One element of one parameter's gradient is made infinite, and nothing else."""

    def __init__(self):
        super().__init__()
        self.spoiled, self.place = None, 0

    def forward(self, x, spoil):
        name, place = self.spoiled, self.place
        extra = 0.0
        if name is not None:
            extra = (self.get_parameter(name).reshape(-1)[place].float() * spoil).sum()
        return super().forward(x) + 0 * extra.detach() + (extra - extra.detach()) if name else super().forward(x)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", [n for n, _ in Net().named_parameters()])
@pytest.mark.parametrize("where", ["first", "middle", "last"])
@pytest.mark.compiled
def test_one_infinite_element_of_any_gradient_stops_the_whole_step(name, where):
    torch.manual_seed(0)
    model = Spoils()
    size = model.get_parameter(name).numel()
    model.spoiled, model.place = name, {"first": 0, "middle": size // 2, "last": size - 1}[where]
    optimizer = torch.optim.AdamW(model.parameters())
    options = {"loss_scale": LossScale(2.0**8), "update": "one_pass"}
    step = amp_graph.TrainStep(model, F.cross_entropy, optimizer, "bf16", **options)
    x, y = next(batches(1))
    step((x, torch.tensor(1.0)), y)
    assert step.skipped_steps == 0
    before = everything(model, optimizer)
    step((x, torch.tensor(INF)), y)
    assert step.skipped_steps == 1
    assert same(before, everything(model, optimizer))


@pytest.mark.compiled
def test_groups_with_rates_and_decay_of_their_own():
    def trained(update):
        model, _ = build()
        groups = [
            {"params": list(model.first.parameters()), "lr": 0.01, "weight_decay": 0.1},
            {"params": [*model.norm.parameters(), *model.second.parameters()], "lr": 0.001, "weight_decay": 0.0},
        ]
        optimizer = torch.optim.Adam(groups)
        step = amp_graph.TrainStep(model, F.cross_entropy, optimizer, "bf16", update=update)
        for i, (x, y) in enumerate(batches(6)):
            optimizer.param_groups[0]["lr"] = 0.01 / (i + 1)
            if i == 3:
                optimizer.param_groups[1]["weight_decay"] = 0.5
            step(x, y)
        return everything(model, optimizer), step.graph_text()

    one, text = trained("one_pass")
    assert close(one, trained("torch")[0])
    assert text.count("one_pass_update_.") == 2


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(20, 16), nn.Linear(16, 20)
        self.head.weight = self.table.weight
        self.frozen = nn.Linear(16, 16).requires_grad_(False)

    def forward(self, ids):
        return self.head(self.frozen(self.table(ids)))


@pytest.mark.parametrize("policy", ["bf16", "bf16-O2"])
@pytest.mark.compiled
def test_tied_and_frozen_weights(policy):
    ids, y = torch.randint(20, (8,)), torch.randint(20, (8,))

    def trained(update):
        model, optimizer = build(Tied)
        step = amp_graph.TrainStep(model, F.cross_entropy, optimizer, policy, update=update)
        frozen = model.frozen.weight.detach().clone()
        for _ in range(4):
            step(ids, y)
        assert torch.equal(frozen, model.frozen.weight)
        return everything(model, optimizer)

    assert close(trained("one_pass"), trained("torch"))


@pytest.mark.compiled
def test_buffers_and_what_nothing_uses():
    x, y = torch.randn(4, 1, 8, 8), torch.randint(0, 3, (4,))

    def trained(update):
        model, optimizer = build(Normalized)
        step = amp_graph.TrainStep(model, F.cross_entropy, optimizer, "bf16", update=update)
        for _ in range(3):
            step(x, y)
        assert torch.equal(model.unused, torch.ones(3))
        return [*everything(model, optimizer), *model.buffers()]

    assert close(trained("one_pass"), trained("torch"))


@pytest.mark.parametrize("weights", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("images", [torch.contiguous_format, torch.channels_last])
@pytest.mark.compiled
def test_any_layout_of_weights_and_gradients(weights, images):
    def trained(update):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 4, 3, padding=1))
        model.to(memory_format=weights)
        x, y = torch.randn(2, 3, 8, 8).contiguous(memory_format=images), torch.randint(4, (2, 8, 8))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        step = amp_graph.TrainStep(model, F.cross_entropy, optimizer, "bf16", update=update)
        for _ in range(3):
            step(x, y)
        return everything(model, optimizer)

    one, two = trained("one_pass"), trained("torch")
    assert [t.stride() for t in one] == [t.stride() for t in two]
    assert close(one, two)


@pytest.mark.compiled
def test_resumed_in_the_middle_it_is_the_same_run():
    def fresh():
        model, optimizer = build()
        return model, optimizer, amp_graph.TrainStep(model, F.cross_entropy, optimizer, "fp16", update="one_pass")

    given = list(batches(6))
    model, optimizer, step = fresh()
    for x, y in given[:3]:
        step(x, y)
    saved = [{**model.state_dict()}, optimizer.state_dict(), step.state_dict()]
    saved = torch.utils._pytree.tree_map(lambda t: t.clone() if isinstance(t, torch.Tensor) else t, saved)
    for x, y in given[3:]:
        step(x, y)
    again, other, resumed = fresh()
    again.load_state_dict(saved[0])
    other.load_state_dict(saved[1])
    resumed.load_state_dict(saved[2])
    for x, y in given[3:]:
        resumed(x, y)
    assert same(everything(model, optimizer), everything(again, other))


@pytest.mark.compiled
def test_no_cast_is_left_of_a_step_but_those_of_activations():
    from torch.utils._python_dispatch import TorchDispatchMode

    class Casts(TorchDispatchMode):
        found = ()

        @classmethod
        def ignore_compile_internals(cls):
            return True

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.found += (func.overloadpacket.__name__,) if "_copy" in func.overloadpacket.__name__ else ()
            return func(*args, **(kwargs or {}))

    def casts(update):
        model, optimizer = build()
        step = amp_graph.TrainStep(model, F.cross_entropy, optimizer, "bf16", update=update)
        x, y = next(batches(1))
        step(x, y)
        with Casts() as mode:
            step(x, y)
        return mode.found

    weights = 4  # each has a gradient that was widened; all copies were written by one call
    assert len(casts("torch")) - len(casts("one_pass")) == weights + 1
    assert "_foreach_copy_" not in casts("one_pass")


# -- when it is not used ------------------------------------------------------------------------------


def test_few_weights_are_not_compiled_for(monkeypatch):
    monkeypatch.setattr("amp_graph.optim.native_update.library", lambda rule: pytest.fail("compiled"))
    model, optimizer = build()
    step = amp_graph.TrainStep(model, F.cross_entropy, optimizer, "bf16")
    step(*next(batches(1)))
    assert "too few to be worth compiling" in amp_graph.report(step).text(width=None)


def large():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 3))
    return model, torch.optim.AdamW(model.parameters())


@pytest.mark.compiled
def test_many_weights_are():
    model, optimizer = large()
    step = amp_graph.TrainStep(model, F.cross_entropy, optimizer, "bf16")
    step(*next(batches(1)))
    assert "update: one pass" in amp_graph.report(step).text()


def without_compiler(monkeypatch, tmp_path):
    monkeypatch.setenv("CC", "no-such-compiler")
    monkeypatch.setenv(jit_compiler.FOLDER, str(tmp_path))
    load.cache_clear()
    library.cache_clear()


def test_without_a_compiler_torchs_kernels_stay_and_the_report_says_so(monkeypatch, tmp_path):
    without_compiler(monkeypatch, tmp_path)
    model, optimizer = large()
    step = amp_graph.TrainStep(model, F.cross_entropy, optimizer, "bf16")
    step(*next(batches(1)))
    text = amp_graph.report(step).text(width=None)
    assert "torch's kernels" in text
    assert "no-such-compiler not found" in text
    assert "_fused_adamw_" in step.graph_text()


def test_what_was_asked_for_is_refused_by_name(monkeypatch, tmp_path):
    def refused(error, match, optimizer=torch.optim.AdamW, policy="bf16", **options):
        model, made = build(optimizer=optimizer)
        with pytest.raises(error, match=match) as caught:
            amp_graph.TrainStep(model, F.cross_entropy, made, policy, **options)(*next(batches(1)))
        assert "legal:" in str(caught.value)
        assert "fix:" in str(caught.value)

    refused(CaptureError, "update='both'", update="both")
    refused(CaptureError, "update='one_pass' with compile='aot_eager'", update="one_pass", compile="aot_eager")
    refused(CaptureError, "after the graph", update="one_pass", optimizer=torch.optim.RMSprop)
    refused(CaptureError, "no low-precision copies", update="one_pass", policy="bf16-O0")
    without_compiler(monkeypatch, tmp_path)
    refused(CompilerError, "no-such-compiler", update="one_pass")


@pytest.mark.compiled
def test_a_compiler_that_refuses_is_quoted(monkeypatch, tmp_path):
    monkeypatch.setenv(jit_compiler.FOLDER, str(tmp_path))
    load.cache_clear()
    with pytest.raises(CompilerError, match=r"(?s)unknown.*fix:"):
        load(SOURCE, ("-DRULE=unknown",))
    assert not list(tmp_path.iterdir()), "nothing half made is left"


@pytest.mark.compiled
def test_a_folder_that_cannot_be_written(monkeypatch, tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    monkeypatch.setenv(jit_compiler.FOLDER, str(file / "inside"))
    load.cache_clear()
    with pytest.raises(CompilerError, match=jit_compiler.FOLDER):
        load(SOURCE, ("-DRULE=SGD", *zeros()))


def zeros():
    return tuple(f"-D{name}=0" for name in ("DECOUPLED", "DECAY", "AMSGRAD", "MOMENTUM", "NESTEROV"))


@pytest.mark.compiled
def test_a_header_that_changed_is_compiled_anew(monkeypatch, tmp_path):
    monkeypatch.setenv(jit_compiler.FOLDER, str(tmp_path / "compiled"))
    changed = tmp_path / jit_compiler.HEADER.name
    changed.write_text(jit_compiler.HEADER.read_text() + "/* another */\n")
    for header, count in ((jit_compiler.HEADER, 1), (jit_compiler.HEADER, 1), (changed, 2)):
        monkeypatch.setattr(jit_compiler, "HEADER", header)
        load.cache_clear()
        load(SOURCE, ("-DRULE=SGD", *zeros()))
        assert len(list((tmp_path / "compiled").glob("*.so"))) == count


@pytest.mark.compiled
def test_compiled_once_for_all_processes(monkeypatch, tmp_path):
    monkeypatch.setenv(jit_compiler.FOLDER, str(tmp_path))
    load.cache_clear()
    assert isinstance(load(SOURCE, ("-DRULE=SGD", *zeros())), ctypes.CDLL)
    made = set(tmp_path.iterdir())
    assert {path.suffix for path in made} == {".so", ".sha256"}
    code = f"from amp_graph.optim.native_update_ops import SOURCE, load; load(SOURCE, ('-DRULE=SGD', *{zeros()!r}))"
    environment = {**os.environ, "CC": "no-such-compiler"}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True, cwd=Path(__file__).parent)
    assert set(tmp_path.iterdir()) == made
