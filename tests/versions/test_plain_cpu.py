"""The emulated machine has neither AVX nor a C compiler, and runs what else this one runs."""

import os
import subprocess
import sys

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


def state(environ):
    """What torch and amp_graph find there: (capability, bf16, AMX, compiler)."""
    done = subprocess.run([sys.executable, "-c", STATE], env=environ, capture_output=True, text=True, check=True)
    return done.stdout.split()


def test_torch_and_our_kernels_see_a_plain_cpu(tmp_path):
    assert state(plain_environment({"PATH": os.environ["PATH"]}, tmp_path)) == ["DEFAULT", "False", "False", "None"]
