"""Run the cases: ``python -m tests.guard.run [--sample]``, which fails where a kernel does, or where none was called.

Each variant (a build, a place of the guard page, a number of threads) runs in children of its own: one that dies names
the case that it died in, and the next goes on behind it.
"""

from __future__ import annotations

import argparse
import faulthandler
import importlib
import mmap
import os
import pkgutil
import re
import struct
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch

import amp_graph
import amp_graph.passes
from amp_graph.passes.native.operator_library import FUNCTIONS
from tests.guard import case
from tests.guard.controls import controls
from tests.guard.memory import PLACES, Guarded
from tests.guard.variants import BUILDS, Variant, prepare, variants

HERE = Path(__file__).parent
# What C exports that reads and writes no tensor.
NO_KERNELS = {"use_openmp", "has_tiles", "panel", "deep"}
# Operators that call no C of ours. A new one belongs here, with a reason, or gets a case.
WITHOUT_C = {
    "cudnn_rnn": "cuDNN's, on CUDA",
    "cudnn_rnn_backward": "cuDNN's, on CUDA",
    "table_gradient": "torch's index_add_",
    "add_rows": "torch's index_add_",
    "dropout_bits": "torch's bernoulli_",
    "mkldnn_rnn_layer": "oneDNN's LSTM",
    "recurrent": "torch's layers",
    "recurrent_backward": "torch's layers",
    "check_finite_and_unscale_": "torch's",
    "update_loss_scale_": "torch's",
}
WITHOUT_OPERATORS = ("amp_graph.integrations",)  # which need packages of their own
CALLED = 1 << 16  # bytes for the names of what a child has called
# Builds and places of a sample: all C is called, that of matrix units by emulation.
SAMPLED = (*(("as torch", place) for place in PLACES), ("emulated units", PLACES[0]))


def load_all() -> None:
    """Import whatever defines an operator, and all cases."""
    for package in (amp_graph.passes, amp_graph):
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if not module.name.startswith(WITHOUT_OPERATORS) and not module.name.endswith(("__main__", "_source")):
                importlib.import_module(module.name)
    for path in sorted(HERE.glob("cases_*.py")):
        importlib.import_module(f"tests.guard.{path.stem}")


def exported() -> set[tuple[str, str]]:
    """Return the source and name of every function that compiled C of ours hands to Python."""
    folders = (Path(next(iter(p))) for p in (amp_graph.passes.__path__, amp_graph.__path__))
    found = set()
    for source in (c for folder in folders for c in folder.rglob("*.c")):
        for name in re.findall(r"^(?:void|int|int64_t) (\w+)\(", source.read_text(), re.MULTILINE):
            found.add((source.stem, name))
    return {(source, name) for source, name in found if name not in NO_KERNELS}


# -- in a child -------------------------------------------------------------------------------------------------------


def run_cases(cases: Sequence[case.Case], variant: Variant, first: int, note: Callable[..., None]) -> None:
    """Run cases from the ``first`` on; ``note`` hears of each before it begins, and of what is wrong."""
    for number in range(first, len(cases)):
        one = cases[number]
        note(number)
        if one.tiled and variant.build in ("AVX2", "DEFAULT"):
            continue
        try:
            with torch.no_grad(), Guarded(variant.place):
                one.run()
        except Exception as error:  # whatever a front end raises is a finding
            line = f"{type(error).__name__}: {error}".splitlines()[0]
            print(f"  FAILS {one.name}: {line[:300]}", flush=True)
            note(number, failed=True)


# -- the parent -------------------------------------------------------------------------------------------------------


class Shared:
    """What a child says to its parent: the case it is in, how many failed, and what it called."""

    def __init__(self) -> None:
        """Share memory with the children to come."""
        self._memory = mmap.mmap(-1, 16 + CALLED)

    def note(self, number: int, failed: bool = False) -> None:
        """Say that case ``number`` begins, or that it has failed."""
        _, count = self.read()
        self._memory[:16] = struct.pack("qq", number, count + failed)

    def read(self) -> tuple[int, int]:
        """Return the number of the case, and how many failed."""
        number, count = struct.unpack("qq", self._memory[:16])
        return number, count

    def tell(self, called: set[tuple[str, str]], operators: set[str]) -> None:
        """Add to what was called."""
        known = self.told() | {" ".join(one) for one in called} | operators
        text = "\n".join(sorted(known)).encode()
        self._memory[16 : 16 + len(text)] = text

    def told(self) -> set[str]:
        """Return what was called."""
        return {*self._memory[16:].rstrip(b"\0").decode().split("\n")} - {""}


def run_variant(cases: Sequence[case.Case], variant: Variant, shared: Shared) -> int:
    """Run all ``cases`` in children; return how many failed, those that killed their child among them."""
    first, died = 0, 0
    shared.note(0)
    before = shared.read()[1]
    while first < len(cases):
        sys.stdout.flush()
        child = os.fork()
        if not child:
            _be_child(cases, variant, shared, first)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if not status:
            break
        number = shared.read()[0]
        died += 1
        print(f"  DIES ({_signal(status)}) {cases[number].name}", flush=True)
        first = number + 1
    return shared.read()[1] - before + died


def _be_child(cases: Sequence[case.Case], variant: Variant, shared: Shared, first: int) -> None:
    status, called = 1, set[tuple[str, str]]()
    try:
        prepare(variant, called)
        run_cases(cases, variant, first, shared.note)
        shared.tell(called, case.OPERATORS_CALLED)
        status = 0
    finally:
        sys.stdout.flush()
        os._exit(status)


def _signal(status: int) -> str:
    return f"signal {-status}" if status < 0 else f"exit status {status}"


def blind() -> Iterator[str]:
    """Yield the controls that a run did not judge right: a kernel that is wrong and passes, or the other way round."""
    for control, place, is_wrong in controls():
        found = run_variant([control], Variant("as torch", place, 1), Shared())
        if found != is_wrong:
            yield f"{control.name}: {found} wrong"


def missing(told: set[str]) -> Iterator[str]:
    """Yield what no case has called: functions of C, and operators."""
    for source, name in sorted(exported()):
        if f"{source} {name}" not in told:
            yield f"{source}.c: {name}"
    for name in sorted(FUNCTIONS):
        if name not in told and name.split(".")[1] not in WITHOUT_C:
            yield f"operator {name}"
    for name in sorted(WITHOUT_C):
        if f"amp_graph.{name}.default" not in FUNCTIONS:
            yield f"operator {name}, which is no more"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is asked for; return how much is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sample", action="store_true", help="a fixed part of the cases, as this CPU runs them")
    parser.add_argument("--only", default="", help="cases whose names match this regular expression")
    parser.add_argument("--build", choices=BUILDS, help="one build alone")
    given = parser.parse_args(arguments)
    load_all()
    cases = [c for c in case.CASES if (c.sampled or not given.sample) and re.search(given.only, c.name)]
    todo = variants() if not given.sample else [Variant(build, place, 1, False) for build, place in SAMPLED]
    todo = [v for v in todo if given.build in (None, v.build)]
    shared, wrong, start = Shared(), 0, time.monotonic()
    unseen = [] if given.only else list(blind())
    for name in unseen:
        print(f"  NOT SEEN {name}")
    for variant in todo:
        print(f"{variant.name}: {len(cases)} cases", flush=True)
        wrong += run_variant(cases, variant, shared)
    lacking = [] if given.only or given.build else list(missing(shared.told()))
    for name in lacking:
        print(f"  NOT CALLED {name}")
    kernels = len(exported())
    print(
        f"{kernels} kernels, {len(cases)} cases, {len(todo)} variants in {time.monotonic() - start:.0f} s: "
        f"{wrong} wrong, {len(lacking)} not called, {len(unseen)} controls not seen"
    )
    return wrong + len(lacking) + len(unseen)


if __name__ == "__main__":
    faulthandler.disable()
    sys.exit(1 if main() else 0)
