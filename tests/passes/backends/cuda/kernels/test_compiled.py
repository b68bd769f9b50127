"""Triton compiles each kernel for the GPUs that are there, Ampere and Hopper, with no GPU at hand."""

import os
import subprocess
import sys

from tests.passes.backends.cuda.kernels.where import mark_where_they_run

pytestmark = mark_where_they_run()
KERNELS = {"rows_kernel", "gradient_kernel", "forward_kernel", "backward_kernel", "parts_kernel", "table_kernel"}
KERNELS |= {"prepare_kernel", "update_kernel", "look_kernel"}


def test_every_kernel_compiles():
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.passes.backends.cuda.kernels.compiled"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert not done.returncode, done.stderr[-3000:]
    lines = [line.split() for line in done.stdout.splitlines()]
    for capability in ("sm_80", "sm_90"):
        assert {line[0] for line in lines if capability in line} == KERNELS
