"""An optimizer's update of many tensors by Triton: the steps of ``torch.optim``, as exact, and copies rounded once."""

import pytest
import torch

from amp_graph.passes.backends.cuda.kernels import optimizer_update as kernels
from amp_graph.passes.backends.cuda.kernels import pointer_tables
from amp_graph.passes.native import triton_loader
from tests.passes.backends.cuda.kernels.where import DEVICE, gave_up, mark_where_they_run, round_as_gpus_do

pytestmark = [mark_where_they_run(), pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")]  # numpy's
BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
INF, NAN = float("inf"), float("nan")
SIZES = (0, 1, 3, 1023, 1025, 4096, 4097, 9000)
ADAM = {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8}
# What torch.optim is given, and our rule with its options.
RULES = {
    "sgd": (torch.optim.SGD, {}, "sgd", {}),
    "momentum": (torch.optim.SGD, {"momentum": 0.9}, "sgd momentum", {"momentum": 0.9}),
    "nesterov": (
        torch.optim.SGD,
        {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
        "sgd decay momentum nesterov",
        {"momentum": 0.9, "weight_decay": 0.1},
    ),
    "adam": (torch.optim.Adam, {}, "adam", ADAM),
    "adam decay": (torch.optim.Adam, {"weight_decay": 0.1}, "adam decay", ADAM | {"weight_decay": 0.1}),
    "adamw": (torch.optim.AdamW, {"weight_decay": 0.1}, "adam decoupled", ADAM | {"weight_decay": 0.1}),
    "amsgrad": (torch.optim.Adam, {"amsgrad": True}, "adam amsgrad", ADAM),
    "maximize": (torch.optim.AdamW, {"maximize": True}, "adam decoupled", ADAM | {"weight_decay": 0.01, "maximize": 1}),
    "small betas": (torch.optim.Adam, {"betas": (0.3, 0.0)}, "adam", ADAM | {"beta1": 0.3, "beta2": 0.0}),
    "adagrad": (
        torch.optim.Adagrad,
        {"lr_decay": 0.1, "weight_decay": 0.1},
        "adagrad decay",
        {"lr_decay": 0.1, "weight_decay": 0.1, "eps": 1e-10},
    ),
}
KINDS = {"sgd": 0, "sgd momentum": 1, "sgd decay momentum nesterov": 1, "adam amsgrad": 3, "adagrad decay": 1}
SHORT = {BF16: "bf16", FP16: "fp16"}


@pytest.fixture(autouse=True)
def _by_triton(monkeypatch):
    monkeypatch.setattr(triton_loader, "_failed", {})
    monkeypatch.setattr(pointer_tables, "_tables", type(pointer_tables._tables)())
    round_as_gpus_do(monkeypatch)
    yield
    assert not gave_up()


def drawn(size, seed, dtype=FP32, offset=0):
    """Normal numbers, ``offset`` elements behind the beginning of their memory."""
    made = torch.randn(size + offset, generator=torch.Generator().manual_seed(seed))
    return made.to(DEVICE, dtype)[offset:]


class Ours:
    """Parameters of ``SIZES``, their states and copies; ``offset``: from the beginning of their memory."""

    def __init__(self, name, low=BF16, sizes=SIZES, offset=0, copied=True):
        *_, words, self.options = RULES[name]
        self.rule = f"{words} {SHORT[low]}"
        self.params = [drawn(n, i, offset=offset) for i, n in enumerate(sizes)]
        zeros = [drawn(n, 0, offset=offset).zero_() for n in sizes]
        self.states = [
            z.clone() if not offset else drawn(len(z), 0, offset=offset).zero_() for z in zeros * KINDS.get(words, 2)
        ]
        self.steps = [] if "sgd" in words else [torch.zeros((), device=DEVICE) for _ in sizes]
        self.with_low = list(range(0, len(sizes), 1)) if copied else []
        self.lows = [self.params[i].to(low) for i in self.with_low]

    def step(self, grads, lr=0.01, found_inf=None, unscale=None, clip=None, **more):
        own = (self.params, grads, self.states, self.steps, self.lows, self.with_low, lr)
        kernels.update(*own, found_inf, unscale, clip, rule=self.rule, **self.options, **more)

    def everything(self):
        return [*self.params, *self.states, *self.steps, *self.lows]

    def copied(self):
        return [t.clone() for t in self.everything()]


def by_torch(name, params, steps, dtype, lr=0.01):
    """Parameters behind ``steps``, a list of gradients each, of torch's optimizer, computed in ``dtype``."""
    kind, options, *_ = RULES[name]
    own = [p.detach().clone().to(dtype).requires_grad_() for p in params]
    optimizer = kind(own, lr=lr, foreach=False, **options)
    for grads in steps:
        for p, grad in zip(own, grads, strict=True):
            p.grad = grad.to(dtype)
        optimizer.step()
    return [p.detach() for p in own]


def check(name, ours, steps, lr=0.01, given=None, **more):
    """Compare with torch in fp32 and fp64. given: the gradients that kernels get, if they prepare them themselves."""
    start = [p.clone() for p in ours.params]
    for grads in given or steps:
        ours.step(grads, lr, **more)
    plain, exact = (by_torch(name, start, steps, dtype, float(lr)) for dtype in (FP32, FP64))
    far = [
        torch.cat([(a.double() - e).abs() for a, e in zip(found, exact, strict=True)]) for found in (ours.params, plain)
    ]
    size = torch.cat(exact).abs()
    assert far[0].norm() <= 1.05 * far[1].norm() + 1e-9 * size.norm(), (far[0].norm(), far[1].norm())
    assert (far[0] <= far[1].max() + 2**-22 * size).all()
    for i, low in zip(ours.with_low, ours.lows, strict=True):
        assert torch.equal(low, ours.params[i].to(low.dtype)), "copies are the rounded parameters, bit for bit"


def gradients(dtype, count=3, sizes=SIZES, offset=0, scale=1.0):
    return [[scale * drawn(n, 100 * k + i, offset=offset).to(dtype) for i, n in enumerate(sizes)] for k in range(count)]


# -- updates ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("low", [BF16, FP16])
@pytest.mark.parametrize("name", RULES)
def test_steps_are_as_exact_as_torchs(name, low):
    check(name, Ours(name, low), gradients(low))


@pytest.mark.parametrize("name", ["nesterov", "adamw", "adagrad"])
@pytest.mark.parametrize("offset", [1, 2, 3])
def test_tensors_that_begin_anywhere(name, offset):
    """Views into a flat buffer, in gradients of fp32, without copies."""
    ours = Ours(name, offset=offset, copied=False)
    assert ours.params[-1].data_ptr() % 16
    check(name, ours, [[drawn(len(g), 7, offset=offset).copy_(g) for g in grads] for grads in gradients(FP32)])


def test_some_with_copies_some_without_some_in_fp32():
    """Four groups, of two launches each, and no more of them for more tensors."""
    ours = Ours("adamw", sizes=(7, 4100, 64, 5) * 4)
    ours.with_low, ours.lows = ours.with_low[::2], ours.lows[::2]
    steps = gradients(FP32, sizes=(7, 4100, 64, 5) * 4)
    given = [[g.to(BF16) if i % 3 else g for i, g in enumerate(grads)] for grads in steps]
    launched = []
    launch = triton_loader.launch
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "launch", lambda *a, **o: launched.append(a[1]) or launch(*a, **o))
        check("adamw", ours, [[g.float() for g in grads] for grads in given], given=given)
    assert len(launched) == 3 * 4 * 2, launched


def test_gradients_that_lie_otherwise():
    p, g = drawn(6 * 35, 0).view(6, 35), drawn(6 * 35, 1).view(35, 6).t()
    one, two = p.clone(), p.clone()
    kernels.update([one], [g], [], [], [], [], 0.1, None, None, None, rule="sgd bf16")
    kernels.update([two], [g.contiguous()], [], [], [], [], 0.1, None, None, None, rule="sgd bf16")
    assert torch.equal(one, two)
    assert (one - (p - 0.1 * g)).abs().max() < 1e-6


@pytest.mark.parametrize("lr", [0.01, FP32, FP64], ids=str)
def test_rates_are_numbers_or_tensors_of_the_device(lr):
    rate = lr if isinstance(lr, float) else torch.tensor(0.01, dtype=lr, device=DEVICE)
    check("adam", Ours("adam"), gradients(BF16), rate)


@pytest.mark.parametrize("low", [BF16, FP16])
def test_unscaled_clipped_and_held(low):
    inverse, clip = torch.tensor(1 / 1024, device=DEVICE), torch.tensor(0.3, device=DEVICE)
    given = gradients(low, scale=1024)
    steps = [[(g.float() * inverse * clip).clamp(-0.25, 0.25) for g in grads] for grads in given]
    check("adamw", Ours("adamw", low), steps, given=given, unscale=inverse, clip=clip, clip_value=0.25)


@pytest.mark.parametrize("offset", [0, 1])
def test_unscaled_gradients_are_stored_where_asked(offset):
    ours, inverse = Ours("adamw"), torch.tensor(2.0**-9, device=DEVICE)
    steps = gradients(FP32, 1, offset=offset)
    given = [[g.mul_(512).div_(512) * 512 for g in steps[0]]]
    check("adamw", ours, steps, given=given, unscale=inverse, found_inf=torch.zeros((), device=DEVICE), store=True)
    assert all(map(torch.equal, given[0], steps[0]))


@pytest.mark.parametrize("verdict", [1.0, INF])
@pytest.mark.parametrize("name", RULES)
def test_a_skipped_step_changes_no_bit(name, verdict):
    ours = Ours(name)
    ours.step(gradients(FP32, 1)[0])
    before, bad = ours.copied(), gradients(FP32, 1)[0]
    bad[4][7] = INF
    kept = [g.clone() for g in bad]
    inverse = torch.tensor(0.5, device=DEVICE)
    ours.step(bad, found_inf=torch.tensor(verdict, device=DEVICE), unscale=inverse, store=True)
    assert all(map(torch.equal, ours.everything(), before))
    assert all(map(torch.equal, bad, kept))
    ours.step(gradients(FP32, 1)[0], found_inf=torch.zeros((), device=DEVICE), unscale=inverse)
    assert not any(torch.equal(a, b) for a, b in zip(ours.params[1:], before[1:], strict=False))


def test_a_skipped_step_makes_copies_current():
    """Whoever is told that copies were written need not ask the device whether the step was skipped."""
    ours = Ours("adamw")
    for low in ours.lows:
        low.fill_(7)
    ours.step(gradients(BF16, 1)[0], found_inf=torch.ones((), device=DEVICE))
    assert all(torch.equal(low, p.to(BF16)) for low, p in zip(ours.lows, ours.params, strict=True))


def test_a_nan_stays_where_it_is():
    ours = Ours("adamw")
    grads = gradients(BF16, 1)[0]
    grads[4][7] = NAN
    ours.step(grads, clip_value=1.0)
    assert [t.isnan().sum().item() for t in ours.params] == [0, 0, 0, 0, 1, 0, 0, 0]


def test_tables_follow_tensors_that_move():
    """Gradients get new memory, options change: each is read where it is now."""
    ours, steps = Ours("adamw"), gradients(BF16, 6)
    check("adamw", ours, steps, given=[[g.clone() for g in grads] for grads in steps])
    assert len(pointer_tables._tables) == 1
    params, other = [p.clone() for p in ours.params], [p.clone() for p in ours.params]
    for rate, found in ((0.1, params), (-0.5, other)):
        kernels.update(found, steps[0], [], [], [], [], rate, None, None, None, rule="sgd bf16")
    assert all(
        torch.allclose((b - o) / -5, p - o, atol=1e-5) for p, b, o in zip(params, other, ours.params, strict=True)
    )


def test_few_tables_are_kept(monkeypatch):
    monkeypatch.setattr(pointer_tables, "MOST_TABLES", 3)
    kept = [torch.ones(4, device=DEVICE) for _ in range(6)]
    for p in kept:
        kernels.update([p], [p.clone()], [], [], [], [], 0.5, None, None, None, rule="sgd bf16")
    assert len(pointer_tables._tables) == 3
    assert all(torch.equal(p, torch.full_like(p, 0.5)) for p in kept)


def test_words_of_tables_wrap_around():
    words = [2**63 - 1, -(2**63), 0, -1, *pointer_tables.bits_of([-1.0, INF, 0.999])]
    key = object()
    for now in (words, words[::-1], [0] * len(words), words):
        assert pointer_tables.table_of(now, torch.device(DEVICE), key).tolist() == now


# -- what is looked at ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [FP32, BF16, FP16])
def test_the_norm_is_that_of_fp64(dtype):
    grads = [*gradients(dtype, 1)[0], drawn(50, 3, offset=3)]
    found_inf, norm = kernels.look(grads)
    exact = torch.cat([g.double() for g in grads]).norm()
    assert (found_inf.item(), found_inf.shape, found_inf.dtype) == (0, (), FP32)
    assert abs(norm - exact) <= 1e-7 * exact


@pytest.mark.parametrize("value", [INF, -INF, NAN])
@pytest.mark.parametrize("dtype", [FP32, BF16, FP16])
def test_one_bad_element_is_found_wherever_it_is(dtype, value):
    for i, place in ((1, 0), (2, 2), (4, 1024), (5, 17), (6, 4096), (7, 8191)):
        grads = gradients(dtype, 1)[0]
        grads[i][place] = value
        assert kernels.look(grads)[0] == 1


def test_large_and_no_gradients():
    huge = [torch.full((1000,), 3e38, device=DEVICE), torch.full((1000,), 3e38, device=DEVICE).to(BF16)]
    assert [t.item() for t in kernels.look(huge)] == [0, INF]
    assert [t.item() for t in kernels.look([torch.empty(0, device=DEVICE)])] == [0, 0]


# -- controls and what is left to torch -------------------------------------------------------------------------------


@pytest.mark.parametrize("wrong", [{"DECOUPLED": False}, {"GRADS": "fp16"}, {"MOMENTUM": False}, {"UNSCALED": False}])
def test_control_a_wrong_kernel_is_seen(wrong, monkeypatch):
    launch = triton_loader.launch

    def broken(module, name, programs, given, **options):
        launch(module, name, programs, given, **options | {k: v for k, v in wrong.items() if k in options})

    def two_forms():
        test_unscaled_clipped_and_held(BF16)
        test_steps_are_as_exact_as_torchs("momentum", BF16)

    monkeypatch.setattr(kernels, "launch", broken)
    with pytest.raises(AssertionError):
        two_forms()
    monkeypatch.setattr(triton_loader, "_checked", set())
    with pytest.raises(kernels.CompilerError, match="not torch's on this device"):
        kernels.kernels(BF16)
    triton_loader._failed.clear()


@pytest.mark.parametrize("name", RULES)
def test_what_does_not_compile_is_left_to_torch(name, monkeypatch):
    monkeypatch.setattr(kernels, "SOURCE", "amp_graph.passes.backends.cuda.kernels.no_such_source")
    check(name, Ours(name), gradients(BF16))
    test_a_skipped_step_changes_no_bit(name, 1.0)
    test_one_bad_element_is_found_wherever_it_is(BF16, NAN)
    test_the_norm_is_that_of_fp64(BF16)
    assert triton_loader.why_failed()
    triton_loader._failed.clear()


def test_one_kernel_that_fails_leaves_the_steps_right(monkeypatch):
    """The factors were computed, the update did not compile: torch makes the step, and counts it once."""
    launch = triton_loader.launch

    def failing(module, name, *given, **options):
        if name == "update_kernel" and not options["ALIGNED"]:
            raise kernels.CompilerError("out of registers")
        launch(module, name, *given, **options)

    monkeypatch.setattr(kernels, "launch", failing)
    ours = Ours("adamw")
    ours.params[3:5] = Ours("adamw", offset=1).params[3:5]
    ours.lows = [p.to(BF16) for p in ours.params]
    check("adamw", ours, gradients(BF16))
    assert [s.item() for s in ours.steps] == [3.0] * len(SIZES)
