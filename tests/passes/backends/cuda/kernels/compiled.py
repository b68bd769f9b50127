"""Compile each kernel for real GPUs, without one, for what the functions that launch it give it.

``python -m tests.passes.backends.cuda.kernels.compiled`` prints a line a variant; with ``every``, which takes minutes,
of all forms of updates; with ``write`` it writes benchmarks/results/triton_variants.md. In the interpreter Python runs
the kernels: what Triton's compiler refuses, such as a global variable, is seen here alone.
"""

import ast
import importlib
import itertools
import re
import sys
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from triton.runtime import driver

from amp_graph.passes.backends.cuda.kernels import add_norm, cross_entropy, embedding_gradient, optimizer_update

CAPABILITIES = (80, 90)


class NoGpu(DriverBase):
    """The driver of a GPU that is not there: its compiler has all that it asks of one."""

    def __init__(self, capability):
        self.capability = capability

    def get_current_target(self):
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self):
        return self.capability  # what is compiled is kept by device

    def get_current_stream(self, device):
        return 0

    def get_device_capability(self, device):
        return divmod(self.capability, 10)

    def get_active_torch_device(self):
        return torch.device("cpu")

    def map_python_to_cpp_type(self, ty):
        return ty

    @classmethod
    def is_active(cls):
        return True

    def get_benchmarker(self):
        raise NotImplementedError("nothing runs")


def compile_alone(seen, capability):
    """Return what stands in for ``launch``: it compiles for what it is given, as a launch does, and runs nothing."""

    def launch(module, kernel, programs, given, *, warps=8, **constants):
        function = getattr(importlib.import_module(module), kernel)
        options = {"num_warps": warps, "enable_fp_fusion": True, **constants}
        made = function.warmup(*given, grid=(programs,), **options)
        assert made.asm["cubin"]
        assert made.metadata.target.arch == capability
        seen.append(f"{kernel} sm_{capability} {constants} shared {made.metadata.shared}")

    return launch


def of_cross_entropy(low):
    for classes in (4, 50257, 128256):
        x, target = torch.empty(2, classes, dtype=low), torch.zeros(2, dtype=torch.int64)
        for weight in (None, torch.ones(classes)):
            for smooth in (0.0, 0.1):
                _, stats = cross_entropy.cross_entropy_and_stats(x, target, weight, -100, smooth)
                for others in (None, x.float()):
                    given = (torch.ones(2), x, stats, target, weight, others, -100, smooth)
                    cross_entropy.cross_entropy_backward_of_stats(*given)


def of_add_norm(low):
    wide = torch.float32
    for width, x, branch in (
        (37, wide, low),
        (1024, wide, low),
        (8192, low, low),
        (4096, low, None),
        (16384, wide, None),
    ):
        x = torch.empty(3, width, dtype=x)
        branch = None if branch is None else x.to(branch)
        for centered in (True, False):
            weight, bias = (torch.ones(width), torch.ones(width).to(low)) if branch is not None else (None, None)
            for wants in ((True, False), (True, True), (False, True)):
                stats, *_ = add_norm.forward(x, branch, weight, bias, width, 1e-5, low, *wants, centered)
            for count, others in ((1, x), (2, None), (3, x.to(low)), (4, x), (5, None)):
                grads = [x.to(low)] * (count - 1) + [x.float()]
                wants = (count % 2 > 0, count > 1, count > 1 and weight is not None, count > 2 and weight is not None)
                add_norm.backward(grads, others, x, stats, weight, width, low, *wants, centered)


def of_embedding_gradient(low):
    for width, ids in ((37, torch.int64), (4096, torch.int32)):
        index = torch.zeros(2, embedding_gradient.PART, dtype=ids)
        for grad, base in ((torch.empty(2, width), None), (torch.empty(2, width, dtype=low),) * 2):
            embedding_gradient.embedding_gradient(grad, index, 2, -1, base)


UPDATES = {  # rules, and how many kinds of state each has
    "adam": 2,
    "adam decay": 2,
    "adam decoupled": 2,
    "adam decay amsgrad": 3,
    "sgd": 0,
    "sgd decay": 0,
    "sgd momentum": 1,
    "sgd decay momentum nesterov": 1,
    "adagrad": 1,
    "adagrad decay": 1,
}


def of_optimizer_update(low):
    """Each rule, in turns with and without what a step decides; AdamW, and with ``every`` each rule, in all forms."""
    forms = list(itertools.product((None, torch.ones(())), (torch.float32, low), (0, 1), (False, True)))
    for n, (rule, kinds) in enumerate(UPDATES.items()):
        own = forms if rule == "adam decoupled" or "every" in sys.argv else forms[n % 2 :: 11]
        for scalar, dtype, begin, copied in own:
            params = [torch.empty(5001)[begin:] for _ in range(2)]
            states = [torch.empty(5001)[begin:] for _ in range(2 * kinds)]
            grads, lows = ([torch.empty(5001, dtype=kind)[begin:] for _ in range(2)] for kind in (dtype, low))
            steps = [] if "sgd" in rule else [torch.zeros(()) for _ in range(2)]
            lr = 0.1 if scalar is None else torch.ones((), dtype=torch.float32 if begin else torch.float64)
            options = {"rule": rule, "store": scalar is not None and dtype == torch.float32}
            options |= {} if scalar is None else {"clip_value": 1.0}
            lows, numbers = (lows, [0, 1]) if copied else ([], [])
            optimizer_update.update(params, grads, states, steps, lows, numbers, lr, scalar, scalar, scalar, **options)
            optimizer_update.look(grads)


LAUNCHES = {
    cross_entropy: of_cross_entropy,
    add_norm: of_add_norm,
    embedding_gradient: of_embedding_gradient,
    optimizer_update: of_optimizer_update,
}


TABLE = Path(__file__).parents[5] / "benchmarks/results/triton_variants.md"
LINE = re.compile(r"(\w+) sm_(\d+) (\{.*\}) shared (\d+)")
SAID = """# Variants of the Triton kernels that compile

Compiled by Triton {} for compute capabilities 8.0 (Ampere) and 9.0 (Hopper) on a machine without a GPU, for bf16 and
fp16; none of these ran. Written by `python -m tests.passes.backends.cuda.kernels.compiled write`. A variant is what the
kernel is compiled for besides its operands' dtypes and alignments; the numbers are bytes of shared memory of a program.

| kernel | compiled for | sm_80 | sm_90 |
|---|---|---:|---:|
"""


def as_table(lines):
    """Return the printed lines as Markdown: a row a variant, with the most shared memory that it takes."""
    found = {}
    for kernel, capability, constants, shared in (m.groups() for m in map(LINE.fullmatch, lines) if m):
        constants = ", ".join(f"{name}={given}" for name, given in ast.literal_eval(constants).items())
        most = found.setdefault((kernel, constants), {})
        most[int(capability)] = max(int(shared), most.get(int(capability), 0))
    rows = [[kernel, constants or "-", *(str(most.get(c, "-")) for c in CAPABILITIES)]
            for (kernel, constants), most in sorted(found.items())]  # fmt: skip
    version = lines[0].split()[-1]
    return SAID.format(version) + "".join(f"| {' | '.join(row)} |\n" for row in rows)


def main():
    lines = [f"triton {triton.__version__}"]
    print(lines[0])
    for capability in CAPABILITIES:
        driver.set_active(NoGpu(capability))
        for low in (torch.bfloat16, torch.float16):
            for module, launches in LAUNCHES.items():
                seen = []
                module.launch = compile_alone(seen, capability)
                launches(low)
                print("\n".join(sorted(set(seen))), flush=True)
                lines += seen
    if "write" in sys.argv:
        TABLE.write_text(as_table(lines))


if __name__ == "__main__":
    sys.exit(main())
