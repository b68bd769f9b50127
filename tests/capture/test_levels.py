"""Levels O2 and O3: parameters in low precision, fp32 masters behind them, checkpoints in fp32."""

import copy
import subprocess
import sys
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import amp_graph
from amp_graph.errors import AmpGraphWarning, CaptureError
from amp_graph.optim.master_weights import master_of
from tests.by_hand import descend
from tests.copied import saved as through_file
from tests.layers import layers
from tests.step.test_train_step import Net, Normalized, batches, build, go, parameters, same, with_step

BF16, F32 = torch.bfloat16, torch.float32
IMAGES = (8, 1, 6, 6)


def dtypes(model):
    return {name: p.dtype for name, p in model.named_parameters()}


def train(model, optimizer, given, scaler=None):
    scaler = scaler or amp_graph.GradScaler("cpu", enabled=False)
    for x, y in given:
        descend(optimizer, F.cross_entropy(model(x), y), scaler)
    return model


def trained_at_o2(steps, **options):
    """A model at O2 after some steps, and its optimizer."""
    model, optimizer = build(**options)
    return train(amp_graph.convert(model, "bf16-O2"), optimizer, batches(steps)), optimizer


def saved(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


def equal(one, two):
    assert one.keys() == two.keys()
    return all(torch.equal(one[name], two[name]) and one[name].dtype == two[name].dtype for name in one)


def test_o2_holds_all_but_norms_low_in_the_same_parameter_objects():
    model = Normalized()
    before = [id(p) for p in model.parameters()]
    amp_graph.convert(model, "bf16-O2")
    assert [id(p) for p in model.parameters()] == before
    assert dtypes(model) == {
        "unused": BF16,
        "conv.weight": BF16,
        "conv.bias": BF16,
        "norm.weight": F32,
        "norm.bias": F32,
        "head.weight": BF16,
        "head.bias": BF16,
    }
    assert model.norm.running_mean.dtype is F32
    kept = amp_graph.convert(Normalized(), "bf16-O2,keep_fp32=head")
    assert dtypes(kept) == {**dtypes(model), "head.weight": F32, "head.bias": F32}
    model(torch.randn(IMAGES)).sum().backward()
    assert all(p.grad is None or p.grad.dtype is p.dtype for p in model.parameters())


def test_o3_holds_all_low_and_keeps_no_masters():
    model = amp_graph.convert(Net(), "bf16-O3")
    assert set(dtypes(model).values()) == {BF16}
    assert not any(master_of(p) is not None for p in model.parameters())
    out = model(torch.randn(4, 6))
    assert out.dtype is F32
    out.sum().backward()


def test_no_weight_is_cast_in_forward():
    model = amp_graph.convert(Net(), "bf16-O2")
    model(torch.randn(4, 6))
    text = amp_graph.report(model).graphs[0].text
    weights = [line.split(":")[0] for line in text.splitlines() if " = input first" in line or "input second" in line]
    assert len(weights) == 4, text
    assert not [w for w in weights for line in text.splitlines() if f"float({w})" in line or f"bfloat16({w})" in line]


ORDERS = ["convert first", "optimizer first"]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    ("kind", "fused"),
    [(kind, fused) for kind in (torch.optim.AdamW, torch.optim.SGD) for fused in (True, False)]
    + [(torch.optim.RMSprop, False)],  # which has no fused form
)
def test_o2_trains_as_o1_does_bit_for_bit(order, kind, fused):
    """Gradients are the same values, and the masters take the same updates."""
    options = {"fused": True} if fused else {}
    one, theirs = build(optimizer=kind, **options)
    train(amp_graph.convert(one, "bf16"), theirs, batches(30))
    two, optimizer = build(optimizer=kind, **options)
    amp_graph.convert(two, "bf16-O2")
    if order == "convert first":
        optimizer = kind(two.parameters(), lr=0.01, **options)
    train(two, optimizer, batches(30))
    assert equal(saved(one), saved(two))
    assert all(torch.equal(p, master_of(p).bfloat16()) for p in two.parameters() if p.dtype is BF16)
    if kind is not torch.optim.SGD:
        assert {id(p) for p in optimizer.state} == {id(p) for p in two.parameters()}
    assert all(t.dtype is F32 for state in optimizer.state.values() for t in state.values())


def test_control_without_masters_updates_are_lost():
    """O3 steps the bf16 parameters themselves, and rounds small updates away."""
    one, _ = trained_at_o2(20, lr=1e-5)
    two, optimizer = build(lr=1e-5)
    before = [p.clone() for p in amp_graph.convert(two, "bf16-O3").parameters()]
    train(two, optimizer, batches(20))
    still = sum((a == b).sum().item() for a, b in zip(before, two.parameters(), strict=True))
    assert still > 0.5 * sum(p.numel() for p in before)
    fresh = build()[0].state_dict()
    moved = [(saved(one)[name] != value).float().mean().item() for name, value in fresh.items()]
    assert min(moved) > 0.9


@layers(lambda calls=2: dict(first=(one := nn.Linear(6, 6)), second=one, head=nn.Linear(6, 3), calls=calls))
def Repeated(self, x):
    """One layer under two names, both of which forward calls, or one."""
    x = F.gelu(self.first(x))
    return self.head(F.gelu(self.second(x)) if self.calls == 2 else x)


@pytest.mark.parametrize("level", ["O2", "O3"])
@pytest.mark.parametrize("calls", [1, 2])
def test_a_module_under_two_names_trains(calls, level):
    """It was held twice while forward ran, and kept what it was held as: in fp32, with no gradient of its own."""
    one, theirs = build(lambda: Repeated(calls))
    two, optimizer = build(lambda: Repeated(calls))
    before = list(two.parameters())
    train(amp_graph.convert(one, "bf16"), theirs, batches(10))
    train(amp_graph.convert(two, f"bf16-{level}"), optimizer, batches(10))
    assert all(a is b and b.is_leaf for a, b in zip(before, two.parameters(), strict=True))
    if level == "O2":
        assert equal(saved(one), saved(two))
    fresh = build(lambda: Repeated(calls))[0].state_dict()
    assert min((saved(two)[name] - value).abs().max() for name, value in fresh.items()) > 0.01


@pytest.mark.sampled(2)
@pytest.mark.parametrize("whole", [True, False], ids=["TrainStep", "loop"])
@pytest.mark.parametrize("how", ["eval", "frozen"])
def test_what_did_not_train_when_it_was_converted_gets_masters_when_it_does(how, whole):
    """Steps far below half a last place of the bf16 parameters add up all the same."""
    model, optimizer = build(lr=1e-5)
    model.eval() if how == "eval" else model.requires_grad_(False)
    amp_graph.convert(model, "bf16-O2")
    assert not any(master_of(p) is not None for p in model.parameters())
    model.train().requires_grad_(True)
    before = saved(model)
    if whole:
        go(amp_graph.TrainStep(model, F.cross_entropy, optimizer), batches(20))
    else:
        train(model, optimizer, batches(20))
    assert all((saved(model)[name] != value).float().mean() > 0.9 for name, value in before.items())
    assert all(t.dtype is F32 for state in optimizer.state.values() for t in state.values())


@pytest.mark.sampled(2)
@pytest.mark.parametrize("clipped", [True, False])
@pytest.mark.parametrize("fused", [True, False])
def test_small_fp16_gradients_reach_the_masters(fused, clipped):
    """Without a fused kernel too, gradients are unscaled in fp32, and not flushed to zero in fp16."""
    results = []
    for level in ("O1", "O2"):
        model, optimizer = build(fused=fused)
        amp_graph.convert(model, f"fp16-{level}")
        scaler = amp_graph.GradScaler("cpu", 2.0**12)
        for x, y in batches(10):
            optimizer.zero_grad()
            scaler.scale(F.cross_entropy(model(x), y) * 2.0**-10).backward()
            if clipped:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 2.0**-12)
            scaler.step(optimizer)
            scaler.update()
            assert all(p.grad.dtype is p.dtype for p in model.parameters())
            model.eval()(torch.cat([x, x]))  # captured while gradients are there
            model.train()
        results.append(saved(model))
    assert equal(*results)


def test_gradients_that_their_owner_holds_in_fp32_stay_so():
    """Only what a scaler has widened for masters is narrowed behind the step."""
    parameter = nn.Parameter(torch.ones(3, dtype=BF16))
    parameter.grad_dtype = F32
    optimizer = torch.optim.SGD([parameter], lr=0.0)
    scaler = amp_graph.GradScaler("cpu", 4.0)
    scaler.scale(torch.zeros(()))
    parameter.grad = torch.full((3,), 4.0)
    scaler.unscale_(optimizer)
    found = parameter.grad
    scaler.step(optimizer)
    assert parameter.grad is found
    assert torch.equal(found, torch.ones(3))


# -- checkpoints --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [Net, Normalized])
def test_state_dict_is_fp32_and_goes_to_an_unconverted_model_and_back(kind):
    model = kind()
    before = saved(model)
    amp_graph.convert(model, "bf16-O2")
    assert equal(before, saved(model))
    plain = kind()
    plain.load_state_dict(model.state_dict())
    assert equal(before, saved(plain))
    other = kind()
    wanted = saved(other)
    model.load_state_dict(other.state_dict())
    assert equal(wanted, saved(model))
    assert all(torch.equal(p, wanted[name].to(p.dtype)) for name, p in model.named_parameters())
    part = next(name for name, _ in model.named_children())
    assert {t.dtype for t in model.get_submodule(part).state_dict().values()} == {F32}
    assert equal(wanted, saved(amp_graph.revert(model)))
    assert set(dtypes(model).values()) == {F32}
    assert not any(m._state_dict_hooks or m._load_state_dict_pre_hooks for m in model.modules())


def test_a_tied_parameter_is_saved_and_loaded_exactly_under_each_of_its_names():
    """Embedding and head of a language model; loading the second name must not round what the first one brought."""

    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.head = nn.Embedding(16, 8), nn.Linear(8, 16, bias=False)
            self.head.weight = self.embedding.weight
            self.head.again = self.head.weight

    model = amp_graph.convert(Tied(), "bf16-O2")
    wanted = saved(Tied())
    assert len(wanted) == 3
    model.load_state_dict(wanted)
    assert equal(wanted, saved(model))
    assert equal(wanted, saved(amp_graph.revert(model)))
    assert not any(m._state_dict_hooks or m._load_state_dict_pre_hooks for m in model.modules())


def low_bits(model):
    """Say whether the masters have bits that bf16 has not."""
    value = saved(model)["second.weight"]
    return not torch.equal(value, value.bfloat16().float())


@pytest.mark.parametrize("whole", [True, False], ids=["step", "loop"])
def test_what_takes_the_place_of_a_parameters_memory_counts(whole):
    """``p.data = ...`` bumps no version counter; torch's own ``vector_to_parameters`` does it."""
    model, optimizer, step = with_step(build(fused=True), "bf16-O2")
    go = (lambda given: [step(x, y) for x, y in given]) if whole else (lambda given: train(model, optimizer, given))
    go(batches(3))
    vector = nn.utils.parameters_to_vector(model.parameters()).detach() * 3
    nn.utils.vector_to_parameters(vector, model.parameters())
    wanted = {name: p.detach().float() for name, p in model.named_parameters()}
    assert equal(saved(model), wanted)
    go(batches(1))
    assert all((value - wanted[name]).abs().max() < 0.02 for name, value in saved(model).items())
    assert low_bits(model)


@pytest.mark.parametrize("to", [{"memory_format": torch.channels_last}, {"dtype": torch.float32}])
def test_a_parameter_that_is_only_moved_keeps_its_master(to):
    model = amp_graph.convert(nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 2, 3)), "bf16-O2")
    wanted = saved(model)
    assert not torch.equal(wanted["0.weight"], wanted["0.weight"].bfloat16().float())
    model.to(**to)
    with torch.no_grad():
        model[1].weight.data = torch.where(model[1].weight > 0, model[1].weight, torch.zeros(()).to(model[1].weight))
    wanted["1.weight"] = wanted["1.weight"].clamp_min(0)  # element by element
    assert equal(saved(model), wanted)


IN_A_FRESH_PROCESS = """
import sys, torch
model = torch.load(sys.argv[1], weights_only=False)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-5)
for _ in range(20):
    optimizer.zero_grad()
    model(torch.ones(4, 6)).sum().backward()
    optimizer.step()
torch.save(model.state_dict(), sys.argv[1])
"""


def test_a_pickled_model_updates_its_masters_in_a_process_that_converted_nothing(tmp_path):
    """Steps of 1e-5 are lost in bf16 parameters, and add up in masters."""
    model, _ = build()
    amp_graph.convert(model, "bf16-O2")
    torch.save(model, tmp_path / "model")
    subprocess.run([sys.executable, "-c", IN_A_FRESH_PROCESS, str(tmp_path / "model")], check=True)
    bias = torch.load(tmp_path / "model")["second.bias"]
    assert torch.allclose(saved(model)["second.bias"] - bias, torch.tensor(20 * 4 * 1e-5), rtol=1e-2)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("first", "second"), [("O1", "O1"), ("O1", "O2"), ("O2", "O1"), ("O2", "O2")])
def test_resumed_at_any_level_it_is_the_same_run(first, second):
    whole, theirs = build(fused=True)
    train(amp_graph.convert(whole, f"fp16-{first}"), theirs, batches(50), scaler := amp_graph.GradScaler("cpu"))
    model, optimizer = build(fused=True)
    begun = amp_graph.GradScaler("cpu")
    given = list(batches(50))
    train(amp_graph.convert(model, f"fp16-{first}"), optimizer, given[:25], begun)
    states = through_file([model.state_dict(), optimizer.state_dict(), begun.state_dict()])
    model, optimizer = build(seed=9, fused=True)
    amp_graph.convert(model, f"fp16-{second}")
    resumed = amp_graph.GradScaler("cpu")
    for thing, state in zip((model, optimizer, resumed), states, strict=True):
        thing.load_state_dict(state)
    train(model, optimizer, given[25:], resumed)
    assert equal(saved(whole), saved(model))
    assert scaler.state_dict() == resumed.state_dict()
    state, wanted = optimizer.state_dict()["state"], theirs.state_dict()["state"]
    assert all(torch.equal(state[i][name], wanted[i][name]) for i in wanted for name in wanted[i])


# -- the whole step -----------------------------------------------------------------------------------


@pytest.mark.sampled(2)
@pytest.mark.parametrize("options", [{}, {"clip_norm": 0.5}], ids=["plain", "clipped"])
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD, torch.optim.RMSprop])
def test_a_train_step_at_o2_is_the_one_at_o1(kind, options):
    results = []
    for level in ("O1", "O2"):
        model, _, step = with_step(build(optimizer=kind), f"fp16-{level}", **options)
        results.append(([step(x, y).item() for x, y in batches(30)], saved(model)))
    assert results[0][0] == results[1][0]
    assert equal(results[0][1], results[1][1])
    assert dtypes(model)["first.weight"] is torch.float16
    assert torch.equal(model.first.weight, master_of(model.first.weight).half())


@pytest.mark.parametrize("options", [{"fused": True}, {"foreach": False}], ids=str)
def test_state_that_an_optimizer_makes_when_it_is_built_is_that_of_masters(options):
    model, optimizer = trained_at_o2(5, optimizer=torch.optim.Adagrad, **options)
    other, _ = build(optimizer=torch.optim.Adagrad, **options)
    amp_graph.convert(other, "bf16-O2")
    theirs = torch.optim.Adagrad(other.parameters(), **{**optimizer.defaults, **options})
    train(other, theirs, batches(5))
    assert {state["sum"].dtype for state in theirs.state.values()} == {F32}
    assert same(parameters(model), parameters(other))


def test_a_model_of_a_train_step_at_o2_can_be_called_and_reverted():
    model, _, step = with_step(build(), "bf16-O2")
    given = list(batches(6))
    for x, y in given[:3]:
        step(x, y)
        model.eval()
        assert model(x).dtype is F32
        model.train()
    other, _, plain = with_step(build(), "bf16-O1")
    go(plain, given[:3])
    assert equal(saved(model), saved(other))
    amp_graph.revert(model)
    assert all(step(x, y) == plain(x, y) for x, y in given[3:])


def test_a_converted_model_in_a_train_step_keeps_its_policy():
    model, optimizer = build()
    step = amp_graph.TrainStep(amp_graph.convert(model, "fp16"), F.cross_entropy, optimizer)
    *_, plain = with_step(build(), "fp16")
    assert all(step(x, y) == plain(x, y) for x, y in batches(3))
    model.register_forward_hook(lambda *_: None)
    with pytest.raises(CaptureError, match="hooks of Net"):
        amp_graph.TrainStep(model, F.cross_entropy, optimizer)(*next(batches(1)))


# -- weights cast once --------------------------------------------------------------------------------


def weight_casts(step):
    """Count the casts in the step's graph whose source is a parameter."""
    nodes = [n for c in step.captured for n in c.step.gm.graph.nodes]
    found = [n for n in nodes if n.target is torch.ops.aten._to_copy.default and n.args[0].op == "placeholder"]
    return [n for n in found if "weight" in n.args[0].meta["amp_input"] or "bias" in n.args[0].meta["amp_input"]]


@pytest.mark.parametrize("policy", ["bf16", "bf16-O2"])
def test_forward_casts_no_weight_and_the_update_writes_the_copies(policy):
    *_, step = with_step(build(), policy, micro_batches=2)
    go(step, batches(2))
    assert not weight_casts(step)
    assert len(step._state.copies) == (4 if policy == "bf16" else 0)
    assert copies_are_fresh(step)


def copies_are_fresh(step):
    return all(torch.equal(c.parameter.bfloat16(), c.low) for c in step._state.copies.values())


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.RMSprop])
def test_micro_batches_cast_weights_once_an_update(kind):
    """By the update where it is part of the graph, else behind it; not once a micro-batch."""
    *_, step = with_step(build(optimizer=kind), "bf16", micro_batches=4)
    go(step, batches(2))
    before = [low._version for low in step.weight_copies()]
    step(*next(batches(1)))
    assert [low._version - known for low, known in zip(step.weight_copies(), before, strict=True)] == [1, 1, 1, 1]


def edit_by_stepping(model, optimizer):
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    optimizer.zero_grad()


EDITS = {
    "in place": torch.no_grad()(lambda model, _: model.first.weight.mul_(1.5)),
    "by loading": lambda model, _: model.load_state_dict({n: t * 1.25 for n, t in model.state_dict().items()}),
    "by another tensor": lambda model, _: setattr(model.second.weight, "data", model.second.weight.detach() * 2.0),
    "by stepping": edit_by_stepping,
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS)
def test_copies_follow_what_others_write(edit, fused):
    model, optimizer, step = with_step(build(fused=fused), "bf16")
    other, theirs = build(fused=True)
    amp_graph.convert(other, "bf16")
    for i, (x, y) in enumerate(batches(6)):
        if i == 3:
            edit(model, optimizer)
            edit(other, theirs)
        step(x, y)
        train(other, theirs, [(x, y)])
    if fused or edit is not edit_by_stepping:  # the for-loop rounds otherwise than the fused kernel
        assert same(parameters(model), parameters(other))
    assert copies_are_fresh(step)


def test_writes_through_data_are_seen_after_refresh():
    model, _, step = with_step(build(), "bf16")
    (x, y), *_ = batches(1)
    step(x, y)
    model.first.weight.data.mul_(3.0)
    assert not copies_are_fresh(step)
    step.refresh()
    assert copies_are_fresh(step)


def test_a_weight_read_low_and_full_gets_both_gradients_in_fp32():
    @layers(lambda: dict(embed=nn.Embedding(3, 6)))
    def Tied(self, x):
        return (x + self.embed.weight.exp().sum(0)) @ self.embed.weight.t()

    model, _, step = with_step(build(Tied), "bf16")
    other, theirs = build(Tied, fused=True)
    amp_graph.convert(other, "bf16")
    go(step, batches(20))
    train(other, theirs, batches(20))
    assert same(parameters(model), parameters(other))


# -- memory -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("whole", [False, True], ids=["loop", "TrainStep"])
def test_o2_takes_what_the_arithmetic_says_and_the_report_shows_it(whole):
    """Without norms: 2 bytes a parameter, 2 its gradient, 4 its master, 8 the moments of AdamW."""

    def build_mlp():
        return nn.Sequential(nn.Linear(6, 64), nn.ReLU(), nn.Linear(64, 3))

    model, optimizer = build(build_mlp)
    count = sum(p.numel() for p in model.parameters())
    if whole:
        step = amp_graph.TrainStep(model, F.cross_entropy, optimizer, "bf16-O2")
        go(step, batches(1))
        report = amp_graph.report(step)
    else:
        train(amp_graph.convert(model, "bf16-O2"), optimizer, batches(1))
        report = amp_graph.report(model, optimizer)
    counters = 4 * len(list(model.parameters()))
    wanted = {"parameters": 2, "gradients": 2, "masters": 4, "optimizer state": 8}
    assert report.memory == {
        kind: size * count + counters * (kind == "optimizer state") for kind, size in wanted.items()
    }
    assert "masters 2.5 KiB" in report.text()
    at_o1 = amp_graph.report(amp_graph.convert(build(build_mlp)[0], "bf16"))
    assert at_o1.memory == {"parameters": 4 * count, "gradients": 4 * count}


def test_the_report_of_a_train_step_counts_its_weight_copies_and_shows_its_graph():
    model, _, step = with_step(build(), "bf16")
    assert "not captured yet: call the step once" in amp_graph.report(step).text()
    go(step, batches(1))
    report = amp_graph.report(step)
    assert report.memory["weight copies"] == 2 * sum(p.numel() for n, p in model.named_parameters() if "norm" not in n)
    assert "linear x2 in first, second" in report.text()
    assert "cross_entropy" in report.text()


# -- errors -------------------------------------------------------------------------------------------


def test_what_o2_refuses():
    wrapped = nn.DataParallel(Net())
    with pytest.raises(CaptureError, match="buckets"):
        amp_graph.convert(wrapped, "bf16-O2")
    assert set(dtypes(wrapped).values()) == {F32}


def test_masters_keep_their_bits_where_a_write_changes_nothing():
    """As DDP does with what it broadcasts."""
    model, _ = trained_at_o2(3)
    before = {name: master_of(p).clone() for name, p in model.named_parameters() if master_of(p) is not None}
    assert any(not torch.equal(full, full.bfloat16().float()) for full in before.values()), "some bits are the masters'"
    with torch.no_grad():
        torch._foreach_copy_(list(model.parameters()), [p.clone() for p in model.parameters()])
    assert all(torch.equal(master_of(p), before[name]) for name, p in model.named_parameters() if name in before)


def test_a_write_to_one_element_changes_its_master_alone():
    model, _ = trained_at_o2(3)
    weight = model.first.weight
    expected = master_of(weight).clone()
    with torch.no_grad():
        weight[0, 0] = 3.0
    expected[0, 0] = 3.0
    assert torch.equal(master_of(weight), expected)


BUILT = ["before convert", "before the model's load", "after it"]


@pytest.mark.parametrize("built", BUILT)
@pytest.mark.parametrize("kind", [torch.optim.AdamW, lambda params: torch.optim.SGD(params, 0.01, momentum=0.9)])
def test_loaded_states_keep_their_bits_or_a_warning_says_that_torch_rounded_them(kind, built):
    model, optimizer = build()
    optimizer = kind(model.parameters())
    train(amp_graph.convert(model, "bf16-O2"), optimizer, batches(2))
    states = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    resumed, _ = build(seed=9)
    steps = [lambda: amp_graph.convert(resumed, "bf16-O2"), lambda: resumed.load_state_dict(states[0])]
    steps.insert(BUILT.index(built), lambda: kind(resumed.parameters()))
    other = [step() for step in steps][BUILT.index(built)]
    assert "load_state_dict" not in other.__dict__
    other.load_state_dict(states[1])
    is_late = built == "after it"
    with pytest.warns(AmpGraphWarning, match="was rounded to") if is_late else nullcontext():
        train(resumed, other, batches(1))
    if not is_late:
        train(model, optimizer, batches(1))
        assert equal(saved(model), saved(resumed))
        mine, theirs = (one.state_dict()["state"] for one in (optimizer, other))
        assert all(torch.equal(mine[i][name], theirs[i][name]) for i in mine for name in mine[i])
