"""Random programs with views, writes through aliases, casts and tied parameters: eager, autocast, converted.

    python -m tests.random_programs --count 5000 --seed 0 [--breaks]

A program is a list of lines over a pool of values that may be views of each other, of the inputs, and of tensors that
the module holds. It is grown line by line: a line that eager PyTorch refuses, forward or backward, is left out. What a
converted program is held to is in ``compare``.
"""

import argparse
import contextlib
import random
import sys
import time
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

import amp_graph
from amp_graph.model_state import CONVERSION
from amp_graph.passes.graph.aliasing import may_overlap
from tests import random_lines
from tests.measure import ZERO_GRADIENT
from tests.random_lines import CASTS, DATA_DEPENDENT, DTYPED, OPERATIONS, ROWS, VIEWS, WIDTH, WRITES, finite, fit, like
from tests.warned import without_warnings

POLICIES = ("bf16", "bf16", "bf16", "fp16", "bf16,accuracy=fast", "bf16,planner=paint")
UNIT = 2.0**-8  # what one rounding to bfloat16 is at most, relative to the value
FACTOR, FLOOR = 4.0, 4 * UNIT
PERTURBED = 3  # runs that say how a program magnifies errors


@dataclass(frozen=True)
class Line:
    """One line: of which kind, by which name, of which values of the pool. A write adds no value to the pool."""

    kind: str
    name: str
    reads: tuple[int, ...]

    def __str__(self) -> str:
        values = ", ".join(f"v{i}" for i in self.reads)
        return f"{self.name}({values})" + ("  # write" if self.kind == "write" else "")


@dataclass(frozen=True)
class Plan:
    """A program without its tensors."""

    seed: int
    lines: tuple[Line, ...]
    outputs: tuple[int, ...]
    trains: bool
    aliased: bool
    policy: str
    data: int = 0  # which tensors it is run on
    sums: bool = False  # returns the sum of all values, so that each is read after the last write

    @property
    def shows_dtypes(self) -> bool:
        """Whether some line depends on the dtype of what it is given, so that it may be another under autocast."""
        return any(line.kind == "cast" or line.name in DTYPED for line in self.lines)

    def __str__(self) -> str:
        number, text = 3, []
        for line in self.lines:
            text.append(str(line) if line.kind == "write" else f"v{number} = {line}")
            number += line.kind != "write"
        inputs = "v0, v1 = x, x.view(-1)[4:28]" if self.aliased else "v0, v1 = x, y"
        head = f"# seed {self.seed}, {self.policy}, {'trains' if self.trains else 'no gradients'}; {inputs}; v2 = z"
        results = [f"v{i}" for i in self.outputs] + ["the sum of all values"] * self.sums
        return "\n".join([head, *text, "return " + ", ".join(results)])


class Program(nn.Module):
    """A plan with its parameters; two layers share a weight, and ``held`` is written by some lines."""

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        torch.manual_seed(plan.seed + 1_000_000 * plan.data)
        self.first, self.second, self.tied = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.tied.weight = self.first.weight
        self.wide = nn.Parameter(torch.randn(3 * WIDTH, WIDTH) / 3)
        self.square = nn.Parameter(torch.randn(WIDTH, WIDTH) / 3)
        self.conv = nn.Conv1d(ROWS, ROWS, 3, padding=1)
        self.pointwise = nn.Conv2d(ROWS, ROWS, 1)
        self.norm, self.batch_norm = nn.LayerNorm(WIDTH), nn.BatchNorm1d(WIDTH)
        self.register_buffer("held", torch.randn(ROWS, WIDTH))
        self.register_buffer("mask", torch.rand(ROWS, WIDTH) > 0.5)
        self.register_buffer("rows", torch.tensor([True, False, True, True]))
        self.register_buffer("index", torch.tensor([2, 0, 0, 3]))
        self.register_buffer("count", torch.tensor(3))
        self.plan = plan
        self.rounds: torch.Generator | None = None  # where set, operands are changed by one rounding
        self.train(plan.trains)

    def forward(self, *inputs: Any) -> Any:
        pool = list(inputs)
        for line in self.plan.lines:
            values = [pool[i] for i in line.reads]
            if line.kind == "write":
                # A copy: torch does not say what a write to a part of its own operand gives.
                WRITES[line.name](self, values[0], like(values[1], values[0]).clone())
            elif line.kind == "view":
                pool.append(VIEWS[line.name](values[0]))
            elif line.kind == "cast":
                pool.append(CASTS[line.name](values[0]))
            elif line.kind == "data":
                pool.append(self._called(DATA_DEPENDENT[line.name], values[0]))
            elif line.kind == "break":
                torch._dynamo.graph_break()
            else:
                pool.append(self._called(OPERATIONS[line.name], *values))
        total = (sum(fit(v) for v in pool),) if self.plan.sums else ()
        return (*(pool[i] for i in self.plan.outputs), *total)

    def _called(self, operation: Any, *values: Any) -> Any:
        """Call an operation, on operands that are changed by one rounding, and with them their gradients."""
        given = [fit(value) for value in values]
        if self.rounds is None:
            return operation(self, *given)
        changed = [t * (1 + UNIT * (2 * torch.rand(t.shape, generator=self.rounds) - 1)) for t in given]
        made = operation(self, *changed)
        shared = {t.untyped_storage().data_ptr() for t in changed}
        return operation(self, *given) if made.untyped_storage().data_ptr() in shared else made


@dataclass(frozen=True)
class Run:
    """What one run leaves behind: named tensors, dtypes of the outputs, and which pairs of tensors overlap."""

    values: dict[str, torch.Tensor]
    dtypes: tuple[torch.dtype, ...]
    aliases: set[tuple[str, str]]
    bits: set[tuple[str, str]]  # those of two dtypes
    in_pieces: bool = False  # converted, and captured in pieces, with autocast around them


def inputs_of(plan: Plan, call: int) -> list[torch.Tensor]:
    torch.manual_seed(plan.seed + 1_000_000 * plan.data + 10_000 * (call + 1))
    x, y, z = torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH, requires_grad=plan.trains)
    return [x, x.view(-1)[4:28] if plan.aliased else y, z]


def run(plan: Plan, make: Any = None, context: Any = None, noise: int = 0, inside: bool = False, calls: int = 1) -> Run:
    """Run a plan ``calls`` times, each with inputs of its own, and its backward; ``noise``: the seed of a perturbation.

    A perturbed run changes every input, parameter and held tensor by up to one rounding to bfloat16, and ``inside``
    the operands of each operation, too.
    """
    model = Program(plan)
    model.rounds = torch.Generator().manual_seed(noise) if inside else None
    _perturb([*model.parameters(), model.held], noise)
    called = make(model) if make else model
    values: dict[str, torch.Tensor] = {}
    dtypes: list[torch.dtype] = []
    aliases: set[tuple[str, str]] = set()
    bits: set[tuple[str, str]] = set()
    for call in range(calls):
        inputs = inputs_of(plan, call)
        _perturb([inputs[0], *([] if plan.aliased else [inputs[1]]), inputs[2]], noise + call if noise else 0)
        with torch.set_grad_enabled(plan.trains), context or contextlib.nullcontext():
            outputs = called(*inputs)
        named = {f"output {i}": t for i, t in enumerate(outputs)} | dict(zip(("x", "y", "z"), inputs, strict=True))
        dtypes += [t.dtype for t in outputs]
        shared = _aliases(named)
        aliases |= {(f"{a} of {call}", b) for a, b in shared}
        bits |= {(f"{a} of {call}", b) for a, b in shared if named[a].dtype != named[b].dtype}
        values |= {f"{name} of call {call}": t.detach().clone() for name, t in named.items()}
        if plan.trains:
            values |= {f"{n} of call {call}": g for n, g in _gradients(model, inputs[2], outputs).items()}
    values |= {name: b.detach().clone() for name, b in model.named_buffers() if b.is_floating_point()}
    conversion = vars(called).get(CONVERSION) if isinstance(called, nn.Module) else None
    in_pieces = bool(conversion and conversion.escaped_runs)
    return Run({n: _as_float(t) for n, t in values.items()}, tuple(dtypes), aliases, bits, in_pieces)


def _gradients(model: nn.Module, leaf: torch.Tensor, outputs: Any) -> dict[str, torch.Tensor]:
    loss: Any = 0.0
    for t in outputs:
        real = torch.view_as_real(t) if t.is_complex() else t
        if real.requires_grad:
            loss = loss + (real.double() * torch.cos(torch.arange(real.numel())).view(real.shape)).sum()
    if not isinstance(loss, torch.Tensor):
        return {}
    wanted = dict(model.named_parameters()) | {"z": leaf}
    found = torch.autograd.grad(loss, list(wanted.values()), allow_unused=True)
    return {f"gradient of {n}": g for n, g in zip(wanted, found, strict=True) if g is not None}


def _aliases(named: dict[str, torch.Tensor]) -> list[tuple[str, str]]:
    items = list(named.items())
    return [
        (a, b)
        for i, (a, x) in enumerate(items)
        for b, y in items[:i]
        if x.untyped_storage().data_ptr() == y.untyped_storage().data_ptr() and x.numel() and may_overlap(x, y)
    ]


def _perturb(tensors: list[torch.Tensor], noise: int) -> None:
    if noise:
        draw = torch.Generator().manual_seed(noise)
        with torch.no_grad():
            for t in tensors:
                t.mul_(1 + UNIT * (2 * torch.rand(t.shape, generator=draw) - 1))


def _as_float(t: torch.Tensor) -> torch.Tensor:
    """Return ``t`` as fp64; integers that are the bits of floats as those."""
    if t.is_complex():
        t = torch.view_as_real(t)
    if t.dtype == torch.int32:
        t = t.contiguous().view(torch.float32)
    return t.double()


# -- growing -----------------------------------------------------------------------------------------------


def grow(seed: int, *, data_dependent: bool = True, breaks: bool = False) -> Plan:
    """Return the program of ``seed``: what eager PyTorch runs, forward and backward, with values of ordinary size."""
    draw = random.Random(seed)
    plan = Plan(seed, (), (0,), draw.random() < 0.5, draw.random() < 0.2, draw.choice(POLICIES), 0, draw.random() < 0.6)
    count, values = draw.randint(6, 12), 3
    for _ in range(4 * count):
        line = _line(draw, values, data_dependent, breaks)
        made = values + (line.kind not in ("write", "break"))
        longer = replace(plan, lines=(*plan.lines, line), outputs=_outputs(draw, made, plan.sums))
        if _runs(longer):
            plan, values = longer, made
        if len(plan.lines) == count:
            break
    return plan


def _line(draw: random.Random, values: int, data_dependent: bool, breaks: bool) -> Line:
    """Draw a line; the latest values are read most, and what was viewed before is written as often as not."""

    def pick() -> int:
        return max(draw.randrange(values) for _ in range(3))

    kinds = {"operation": 6, "view": 5, "write": 5, "cast": 1, "data": 2 * data_dependent, "break": breaks}
    kind = draw.choices(list(kinds), list(map(float, kinds.values())))[0]
    tables = {"view": VIEWS, "write": WRITES, "cast": CASTS, "data": DATA_DEPENDENT, "break": {"break": None}}
    table: Any = tables.get(kind, OPERATIONS)
    names = list(table)
    weights = [4.0 if n in ("first", "second", "tied", "matmul") else 1.0 for n in names]
    return Line(
        kind, draw.choices(names, weights)[0], (pick(), pick()) if kind in ("operation", "write") else (pick(),)
    )


def _outputs(draw: random.Random, values: int, sums: bool) -> tuple[int, ...]:
    if sums:
        return ()
    return tuple(dict.fromkeys([values - 1, *(draw.randrange(values) for _ in range(draw.randint(1, 3)))]))


def _runs(plan: Plan) -> bool:
    try:
        with without_warnings(Warning):
            found = run(plan)
    except (RuntimeError, IndexError, ValueError, TypeError, NotImplementedError):
        return False
    return all(map(finite, found.values.values()))


# -- checking ----------------------------------------------------------------------------------------------


@dataclass
class Verdict:
    """What was found wrong with a program; nothing where it is right."""

    plan: Plan
    wrong: list[str] = field(default_factory=list)
    worst: float = 0.0  # the largest error, as a part of what is allowed


def check(plan: Plan, make: Any = amp_graph.convert) -> Verdict:
    """Compare a converted program with the eager one; see ``compare``. What is wrong is so on every set of tensors.

    A clamp or a relu whose operand lies at its threshold sends a whole gradient here or there by the last bit: that
    happens to one set of tensors in hundreds, and to autocast as well; a lost write happens to all.
    """
    verdict = compare(plan, make)
    for data in range(1, 3):
        if verdict.wrong and all(": error " in w for w in verdict.wrong) and _runs(replace(plan, data=data)):
            verdict = replace(compare(replace(plan, data=data), make), plan=plan)
    return verdict


def compare(plan: Plan, make: Any = amp_graph.convert) -> Verdict:
    """Compare a converted program with the eager one: values, inputs and held tensors as left, gradients, aliases.

    The reference is eager fp32: its own error is 2**16 times below what is asked, and in fp64 a user's ``.float()``
    would be another program. A program may magnify the rounding of its operands, and its writes may make that differ
    from value to value, so an absolute bound would be wrong, and a ratio to autocast's error alone is a ratio of two
    draws, with long tails. Each tensor's error (relative, in norm) may be FACTOR times the largest of those of
    ``torch.autocast`` and of eager fp32 runs whose inputs and parameters were perturbed by one rounding, plus FLOOR,
    which is of a few roundings. Where autocast cannot run the program, keeps in fp32 what "fast" rounds, or does not
    count, operands of operations are perturbed as well.

    Where a program shows dtypes (a complex view that is written, ``.float()``), autocast itself may lose writes, which
    excuses nothing: its error counts at most ten times the perturbed ones'. But code between pieces, where Dynamo
    breaks a program, runs under autocast, and has bits and dtypes as there: of such a program autocast's error counts
    whole, and memory that is shared there, or not, may be so here; memory that holds bits of bf16 and of fp32 there
    cannot be shared here, where both are returned in fp32. A write that is lost, or done twice, is an error of the size
    of the value, which is 60 times FLOOR.
    """
    verdict = Verdict(plan)
    with without_warnings(Warning):
        want = run(plan, calls=2)
        cast = _under_autocast(plan)
        inside = cast is None or "fast" in plan.policy or plan.shows_dtypes
        near = [_errors(run(plan, noise=7 * (i + 1), inside=inside, calls=2), want) for i in range(PERTURBED)]
        autocast = _errors(cast, want) if cast else {}
        torch._dynamo.reset()
        try:
            got = run(plan, lambda model: make(model, plan.policy), calls=2)
        except Exception as error:
            verdict.wrong.append(f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}")
            return verdict
    if got.dtypes != want.dtypes:
        verdict.wrong.append(f"dtypes {got.dtypes}, not {want.dtypes}")
    aliases = got.aliases ^ want.aliases
    if cast and got.in_pieces:
        aliases -= (cast.aliases ^ want.aliases) | cast.bits
    if aliases:
        verdict.wrong.append(f"aliases differ: {sorted(aliases)}")
    if got.values.keys() != want.values.keys():
        verdict.wrong.append(f"only in one: {sorted(got.values.keys() ^ want.values.keys())}")
        return verdict
    errors = _errors(got, want)

    def judge(autocast: dict[str, float]) -> Verdict:
        judged = Verdict(plan)
        for name, error in errors.items():
            own = max(one.get(name, 0.0) for one in near)
            most = 10 * own if plan.shows_dtypes and not got.in_pieces else float("inf")
            allowed = FACTOR * max(own, min(autocast.get(name, 0.0), most)) + FLOOR
            allowed *= 3 if "fast" in plan.policy else 1  # the roundings of a stream that autocast keeps in fp32
            judged.worst = max(judged.worst, error / allowed)
            if not error <= allowed:
                judged.wrong.append(f"{name}: error {error:.3g}, allowed {allowed:.3g}")
        return judged

    judged = judge(autocast)
    if judged.wrong and (kept := _under_autocast(plan, keeps_low=True)):
        judged = judge({n: max(error, autocast.get(n, 0.0)) for n, error in _errors(kept, want).items()})
    return replace(judged, wrong=verdict.wrong + judged.wrong)


def _under_autocast(plan: Plan, *, keeps_low: bool = False) -> Run | None:
    """Run ``plan`` under autocast; None if that fails.

    ``fit`` makes a value fp32 that autocast made low: eager and captured programs have none there. ``keeps_low``: it
    does not, so the program is the captured one.
    """
    low = torch.float16 if "fp16" in plan.policy else torch.bfloat16
    random_lines.KEEPS_LOW = keeps_low
    try:
        return run(plan, context=torch.autocast("cpu", low), calls=2)
    except (RuntimeError, IndexError, ValueError, TypeError):  # autocast runs not all that fp32 does
        return None
    finally:
        random_lines.KEEPS_LOW = False


def _errors(got: Run, want: Run) -> dict[str, float]:
    """Return each tensor's error relative to its size, or to a hundredth of the usual size where it nearly cancels.

    A gradient that is zero in exact arithmetic is measured by what all gradients carry; see ``tests.measure``.
    """
    sizes = {
        n: t.nan_to_num(0.0, 0.0, 0.0).square().mean().sqrt().item() if t.numel() else 0.0
        for n, t in want.values.items()
    }
    usual = sorted(sizes.values())[len(sizes) // 2]
    gradients = [n for n in sizes if n.startswith("gradient")]
    typical = torch.cat([want.values[n].flatten() for n in gradients] or [torch.zeros(1)]).square().mean().sqrt().item()
    sizes |= {n: typical for n in gradients if sizes[n] <= ZERO_GRADIENT * typical}
    found = {}
    for name, t in want.values.items():
        other = got.values.get(name)
        if other is None or other.shape != t.shape:
            found[name] = float("inf")
        elif t.numel():
            there = t.isfinite()  # a second call on what the first has written may have no number
            wrong = (other[there] - t[there]).square().sum().div(t.numel()).sqrt().item()
            found[name] = wrong / max(sizes[name], usual / 100, 1e-6)
    return found


def shrink(plan: Plan, make: Any = amp_graph.convert) -> Plan:
    """Return a program with as few lines and outputs as still fail."""
    smaller = True
    while smaller:
        smaller = False
        for one in _smaller(plan):
            if _runs(one) and check(one, make).wrong:
                plan, smaller = one, True
                break
    return plan


def _smaller(plan: Plan) -> list[Plan]:
    found = []
    for i, line in enumerate(plan.lines):
        if line.kind in ("write", "break"):
            found.append(replace(plan, lines=(*plan.lines[:i], *plan.lines[i + 1 :])))
        elif line.name != "same":
            same = Line("view", "same", line.reads[:1])
            found.append(replace(plan, lines=(*plan.lines[:i], same, *plan.lines[i + 1 :])))
    found += [
        replace(plan, outputs=tuple(o for o in plan.outputs if o != out)) for out in plan.outputs[1 - plan.sums :]
    ]
    return found


def main(argv: list[str]) -> int:
    from amp_graph.passes.precision import predict_time

    parser = argparse.ArgumentParser(prog="python -m tests.random_programs")
    parser.add_argument("--count", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--fixed-shapes", action="store_true", help="without shapes that depend on values")
    parser.add_argument("--breaks", action="store_true", help="with graph breaks")
    parser.add_argument("--shrink", action="store_true", help="print the smallest program that fails as well")
    asked = parser.parse_args(argv)
    predict_time.WORTH_IT = 0.0
    torch.set_num_threads(1)
    start, failed, worst = time.perf_counter(), 0, []
    for seed in range(asked.seed, asked.seed + asked.count):
        verdict = check(grow(seed, data_dependent=not asked.fixed_shapes, breaks=asked.breaks))
        worst.append(verdict.worst)
        if len(worst) % 100 == 0:
            print(f"{len(worst)} programs, {failed} wrong", file=sys.stderr, flush=True)
        if verdict.wrong:
            failed += 1
            plan = shrink(verdict.plan) if asked.shrink else verdict.plan
            print(f"{plan}\n  " + "\n  ".join(check(plan).wrong[:4]), flush=True)
    middle, high = sorted(worst)[len(worst) // 2], sorted(worst)[int(len(worst) * 0.99)]
    print(
        f"{asked.count} programs, {failed} wrong, in {time.perf_counter() - start:.0f} s; errors as a part of what is"
        f" allowed: median {middle:.3f}, 99 % {high:.3f}, largest {max(worst):.3f}"
    )
    return failed > 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
