"""The emulated machine has neither AVX nor a C compiler, and runs what else this one runs."""

import os
import subprocess
import sys

import pytest

from tests.versions.plain_cpu import plain_environment

STATE = """
import torch
from amp_graph.passes.native.code_cache import CompilerError, compiler
from amp_graph.passes.torch_compat.devices import cpu_has_amx, cpu_has_bf16
try:
    found = compiler()
except CompilerError:
    found = None
print(torch.backends.cpu.get_cpu_capability(), cpu_has_bf16(), cpu_has_amx(), found)
"""


def test_compilers_are_hidden_and_other_programs_are_not(tmp_path):
    place = tmp_path / "bin"
    place.mkdir()
    for name in ("cc", "x86_64-linux-gnu-gcc-12", "c++", "clang-19", "git", "ccache-clean", "dot"):
        (place / name).touch()
    made = plain_environment({"PATH": f"{place}:{tmp_path / 'none'}", "CC": "gcc"}, tmp_path / "made")
    assert "CC" not in made
    first = tmp_path / "made" / "programs" / "0"
    assert sorted(link.name for link in first.iterdir()) == ["ccache-clean", "dot", "git"]


def state(environ):
    """What torch and amp_graph find there: (capability, bf16, AMX, compiler)."""
    done = subprocess.run([sys.executable, "-c", STATE], env=environ, capture_output=True, text=True, check=True)
    return done.stdout.split()


def test_torch_and_our_kernels_see_a_plain_cpu(tmp_path):
    assert state(plain_environment({"PATH": os.environ["PATH"]}, tmp_path)) == ["DEFAULT", "False", "False", "None"]


@pytest.mark.compiled
def test_what_is_kept_is_that_of_this_machine(tmp_path):
    given = {"PATH": os.environ["PATH"]}
    *cpu, compiler = state(given)
    assert compiler != "None"
    assert state(plain_environment(given, tmp_path / "vectors", vectors=True)) == [*cpu, "None"]
    assert state(plain_environment(given, tmp_path / "compiler", compiler=True)) == [
        "DEFAULT",
        *["False"] * 2,
        compiler,
    ]
