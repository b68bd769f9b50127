"""Compiled C between guard pages: a fixed sample of ``make guard``, and controls that it must find."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from amp_graph.passes.backends.cpu.norm import batch_norm_kernel
from amp_graph.passes.native.jit_compiler import CompilerError

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="kernels that may die run in forks")


@pytest.mark.multiplied  # some of the kernels are made for such CPUs alone
def test_no_kernel_leaves_its_tensors_in_a_sample_and_broken_ones_are_found():
    """A process of its own: threads that tests have started do not outlive the forks that cases run in."""
    try:
        batch_norm_kernel.library(batch_norm_kernel.torch.bfloat16)
    except CompilerError as error:
        pytest.skip(str(error))
    done = subprocess.run(
        [sys.executable, "-m", "tests.guard.run", "--sample"],
        capture_output=True,
        text=True,
        timeout=600,
        cwd=Path(__file__).parents[1],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    last = done.stdout.splitlines()[-1]
    assert " 0 wrong, 0 not called, 0 controls not seen" in last, last


def test_a_kernel_or_an_operator_without_a_case_fails_the_run():
    from tests.guard import run

    run.load_all()
    every = {" ".join(one) for one in run.exported()} | set(run.FUNCTIONS)
    assert not list(run.missing(every)), "each exception is an operator that there is"
    left_out = every - {"depthwise_kernel input_gradient", "amp_graph.batch_norm_relu.default"}
    wanted = ["depthwise_kernel.c: input_gradient", "operator amp_graph.batch_norm_relu.default"]
    assert list(run.missing(left_out)) == wanted
