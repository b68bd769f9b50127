"""Whole steps, and loops with ``amp_graph.optim``, whose updates are Triton's: as close to torch's as those of C."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import amp_graph
from amp_graph.errors import CaptureError
from amp_graph.optim import native_update, native_update_ops
from amp_graph.optim import optimizers as optim
from amp_graph.passes.backends.cuda.kernels import optimizer_update
from amp_graph.passes.native import triton_loader
from amp_graph.passes.profitability import cuda_kernel_thresholds
from amp_graph.scaling.loss_scale import LossScale
from tests.optim.test_optimizers import backward, everything, same, stale, weight_casts
from tests.optim.test_optimizers import build as build_loop
from tests.passes.backends.cuda.kernels.where import DEVICE, gave_up, mark_where_they_run, round_as_gpus_do
from tests.step.test_train_step import OPTIMIZERS, batches, build

pytestmark = [mark_where_they_run(), pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")]  # numpy's
INF = float("inf")
ON_CPU = pytest.mark.skipif(DEVICE != "cpu", reason="a GPU has no copies that outlive a call")


@pytest.fixture(autouse=True)
def launched(monkeypatch):
    """Choose the kernels for models of any size, on the CPU in the interpreter; the names of those that ran."""
    seen, launch = [], triton_loader.launch
    monkeypatch.setattr(triton_loader, "_failed", {})
    monkeypatch.setattr(native_update_ops, "BY_TRITON", by_triton := {DEVICE})
    monkeypatch.setattr(native_update, "BY_TRITON", by_triton)
    monkeypatch.setattr(cuda_kernel_thresholds, "LEAST_SPARED", 1)
    optimizer_update.kernels(torch.bfloat16)
    monkeypatch.setattr(optimizer_update, "launch", lambda m, k, *a, **o: seen.append(k) or launch(m, k, *a, **o))
    round_as_gpus_do(monkeypatch)
    yield seen
    assert not gave_up()


# -- whole steps ------------------------------------------------------------------------------------------------------


def trained(update, policy="bf16", optimizer=torch.optim.AdamW, steps=3, given=None, scale=None, **options):
    """Losses, parameters and state, copies, the scale, and the step."""
    model, made = build(optimizer=optimizer, **(given or {}))
    options |= {} if scale is None else {"loss_scale": LossScale(scale)}
    step = amp_graph.TrainStep(model.to(DEVICE), F.cross_entropy, made, policy, update=update, **options)
    losses = [step(x.to(DEVICE), y.to(DEVICE)) for x, y in batches(steps)]
    scale = () if step.loss_scale is None else step.loss_scale.values()
    return torch.stack(losses), everything(model, made), step.weight_copies(), scale, step


def check(launched, **options):
    ours = trained("one_pass", **options)
    assert {"prepare_kernel", "update_kernel"} <= set(launched)
    launched.clear()
    theirs = trained("torch", **options)
    assert not launched
    torch.testing.assert_close(ours[0], theirs[0], rtol=1e-4, atol=0)
    assert all(torch.allclose(a, b, 1e-4, 1e-5) for a, b in zip(ours[1], theirs[1], strict=True))
    assert all(torch.allclose(a.float(), b.float(), 2e-2, 1e-3) for a, b in zip(ours[2], theirs[2], strict=True))
    assert ours[3] == theirs[3]
    return ours[-1]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_are_those_of_torchs_kernels(name, launched):
    kind, given = OPTIMIZERS[name]
    step = check(launched, optimizer=kind, given=given)
    assert "one_pass_update_" in step.graph_text()
    assert "_fused_" not in step.graph_text()
    assert "update: one pass" in amp_graph.report(step).text()


@pytest.mark.parametrize("policy", ["fp16", "bf16-O2"])
def test_scaled_clipped_and_over_micro_batches(policy, launched):
    options = {"clip_norm": 0.5, "clip_value": 0.1, "micro_batches": 2, "scale": 2.0**10}
    check(launched, policy=policy, **options)


def test_copies_are_the_rounded_weights():
    *_, copies, _, step = trained("one_pass")
    rounded = [p.detach().bfloat16() for p in step.model.parameters()]
    assert len(copies) == 4
    assert all(any(c.shape == r.shape and torch.equal(c, r) for r in rounded) for c in copies)


def test_a_bad_step_changes_nothing():
    *_, step = trained("one_pass", "fp16", scale=2.0**8)
    (x, y), *_ = batches(1)
    before = everything(step.model, step.optimizer) + [c.clone() for c in step.weight_copies()]
    bad = x.clone()
    bad[0, 0] = INF
    step(bad.to(DEVICE), y.to(DEVICE))
    assert same(before, everything(step.model, step.optimizer) + step.weight_copies())
    assert (step.skipped_steps, step.loss_scale.values()[0]) == (1, 2.0**7)
    step(x.to(DEVICE), y.to(DEVICE))
    assert not same(before[:6], everything(step.model, step.optimizer)[:6]), "control: a good step does"


@pytest.mark.skipif(DEVICE != "cpu", reason="an error of a fake kernel")
def test_tables_of_embeddings_keep_dense_gradients(launched):
    """Rows are read by C alone."""
    torch.manual_seed(0)
    words = nn.Sequential(nn.Embedding(40, 16), nn.Flatten(), nn.Linear(48, 3))
    optimizer = torch.optim.AdamW(words.parameters())
    step = amp_graph.TrainStep(words, F.cross_entropy, optimizer, "bf16", update="one_pass")
    ids, y = torch.randint(40, (8, 3)), torch.randint(3, (8,))
    losses = [step(ids, y).item() for _ in range(4)]
    assert "update_kernel" in launched
    assert "gradient_rows" not in step.graph_text()
    assert losses[-1] < losses[0]


def test_what_spares_little_and_what_is_switched_off_is_told(monkeypatch):
    monkeypatch.setattr(cuda_kernel_thresholds, "LEAST_SPARED", 1 << 26)
    weights = 6 * 24 + 24 * 3
    *_, step = trained("auto")
    told = amp_graph.report(step).text(None)
    assert f"update: torch's kernels: one pass would spare {12 * (weights + 27):,} bytes, fewer than" in told
    monkeypatch.setattr(cuda_kernel_thresholds, "LEAST_SPARED", 1)
    monkeypatch.setattr(triton_loader, "why_no_triton", lambda: "it is switched off here")
    *_, step = trained("auto")
    assert "update: torch's kernels: no Triton kernel: it is switched off here" in amp_graph.report(step).text(None)
    with pytest.raises(CaptureError, match=r"(?s)'one_pass', but no Triton kernel: it is switched off.*legal:.*fix:"):
        trained("one_pass")


def test_a_kernel_that_fails_later_leaves_the_step_to_torch(monkeypatch):
    def failing(*given, **options):
        raise optimizer_update.CompilerError("out of memory")

    wanted = trained("torch", "fp16", scale=2.0**8)
    monkeypatch.setattr(optimizer_update, "launch", failing)
    found = trained("one_pass", "fp16", scale=2.0**8)
    assert all(torch.allclose(a, b, 1e-4, 1e-5) for a, b in zip(found[1], wanted[1], strict=True))


# -- loops ------------------------------------------------------------------------------------------------------------

LOOPS = {
    "sgd": (optim.SGD, torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    "adam": (optim.Adam, torch.optim.Adam, {"weight_decay": 0.1}),
    "adamw": (optim.AdamW, torch.optim.AdamW, {}),
    "amsgrad": (optim.AdamW, torch.optim.AdamW, {"amsgrad": True}),
    "adagrad": (optim.Adagrad, torch.optim.Adagrad, {}),
}


def on_the_same_gradients(ours, theirs, steps=3, scaler=None, bad=None):
    """Step both; with a scaler's verdict and scale as it passes them; step ``bad`` has an infinite gradient."""
    (model, optimizer), (other, their) = ours, theirs
    for i in range(steps):
        optimizer.zero_grad()
        backward(model, i)
        for p, q in zip(model.parameters(), other.parameters(), strict=True):
            q.grad = None if p.grad is None else p.grad.clone()
            if i == bad and p.grad is not None:
                p.grad.view(-1)[0] = q.grad.view(-1)[0] = INF
        for each in (optimizer, their):
            if scaler:
                each.grad_scale, each.found_inf = torch.tensor(scaler), torch.tensor(float(i == bad))
            each.step()


@ON_CPU
@pytest.mark.parametrize("name", LOOPS)
def test_loops_are_those_of_torchs_kernels_and_cast_no_weight(name, launched):
    kind, torchs, options = LOOPS[name]
    ours, theirs = build_loop(kind, **options), build_loop(torchs, "", fused=True, **options)
    ours[0](torch.ones(8, 16))  # a forward makes the copies
    on_the_same_gradients(ours, theirs)
    assert ours[1].how == "one pass"
    assert "update_kernel" in launched
    assert all(torch.allclose(a, b, 1e-4, 1e-6) for a, b in zip(everything(*ours), everything(*theirs), strict=True))
    assert not stale(ours[0])
    assert weight_casts(ours[0]) == 0
    assert f"update: {ours[1].how}" in amp_graph.report(*ours).notes


@ON_CPU
@pytest.mark.parametrize("bad", [None, 1])
def test_what_a_scaler_passes_is_read_on_the_device(bad, monkeypatch):
    monkeypatch.setattr(torch.Tensor, "item", lambda t: pytest.fail("a copy to the host"))
    ours, theirs = build_loop(optim.AdamW), build_loop(torch.optim.AdamW, "", fused=True)
    on_the_same_gradients(ours, theirs, scaler=4.0, bad=bad)
    assert ours[1].how == "one pass"
    pairs = [*zip(everything(*ours), everything(*theirs), strict=True)]
    pairs += [
        (p.grad, q.grad)
        for p, q in zip(ours[0].parameters(), theirs[0].parameters(), strict=True)
        if p.grad is not None
    ]
    assert all(torch.allclose(a, b, 1e-4, 1e-6) for a, b in pairs)
    assert not stale(ours[0])


@ON_CPU
def test_a_bad_step_leaves_all_bits_and_no_old_copy():
    model, optimizer = ours = build_loop(optim.AdamW)
    on_the_same_gradients(ours, build_loop(torch.optim.AdamW, "", fused=True))
    with torch.no_grad():
        model.large.weight.mul_(1.5)  # its copy is old now
    before = everything(*ours)
    optimizer.found_inf = torch.ones(())
    optimizer.step()
    assert optimizer.how == "one pass"
    assert same(before, everything(*ours))
    assert not stale(model)


def of_fp16(model, optimizer):
    optimizer.param_groups[0]["lr"] = torch.tensor(1e-3, dtype=torch.float16)


def of_fp64(model, optimizer):
    model.unused.data, model.unused.grad = model.unused.data.double(), torch.ones(16).double()


def with_gaps(model, optimizer):
    model.unused.data, model.unused.grad = torch.ones(32)[::2], torch.ones(16)


LEFT = {
    "a learning rate is a tensor": of_fp16,
    "is not fp32 on": of_fp64,
    "is not dense fp32 on": with_gaps,
    "would spare 0 bytes": lambda model, optimizer: amp_graph.revert(model),
}


@ON_CPU
@pytest.mark.parametrize("why", LEFT)
def test_what_is_left_to_torch(why, launched):
    results = []
    for kind in (optim.AdamW, torch.optim.AdamW):
        model, optimizer = build_loop(kind, fused=True)
        backward(model)  # copies are made
        LEFT[why](model, optimizer)
        for i in range(2):
            backward(model, i)
            optimizer.step()
        results.append(everything(model, optimizer))
        assert kind is torch.optim.AdamW or why in optimizer.how, optimizer.how
    assert not launched
    assert same(*results)


@ON_CPU
@pytest.mark.parametrize("name", ["found_inf", "grad_scale"])
@pytest.mark.parametrize("given", [torch.ones(2), torch.ones((), dtype=torch.float64), torch.ones((), device="meta")])
def test_verdicts_and_scales_that_the_device_cannot_read(name, given):
    model, optimizer = build_loop(optim.AdamW)
    backward(model)
    setattr(optimizer, name, given)
    assert "scaler is not fp32 on" in optimizer._why_not_by_triton(optimizer.param_groups[0]["params"])
