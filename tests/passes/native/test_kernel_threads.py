"""Threads of compiled C: those of torch's OpenMP, or its own where there is none; the same bits by any."""

import os
import subprocess
import sys
import textwrap

import pytest
import torch

from amp_graph.passes.backends.cpu.norm import batch_norm_kernel
from amp_graph.passes.native import jit_compiler
from amp_graph.passes.native.jit_compiler import CompilerError

X = torch.randn(8, 256, 16, 16, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
X = X.contiguous(memory_format=torch.channels_last)
W, B = torch.linspace(0.5, 1.5, 256), torch.linspace(-1, 1, 256)


def forward():
    return batch_norm_kernel.batch_norm_relu(X, None, None, None, W, B, 0.1, 1e-5, True)


@pytest.fixture(autouse=True)
def _needs_a_compiler():
    try:
        batch_norm_kernel.library(torch.bfloat16)
    except CompilerError as error:
        pytest.skip(str(error))


def on(count):
    torch.set_num_threads(count)
    out, stats = forward()
    return [out, stats, *batch_norm_kernel.batch_norm_relu_backward(out, X, None, W, B, stats, True, True)]


def test_the_same_bits_by_one_thread_by_openmp_and_by_threads_of_its_own():
    library = batch_norm_kernel.library(torch.bfloat16)
    assert (library in jit_compiler._on_openmp) is jit_compiler.has_openmp()
    one, two = on(1), on(2)
    library.use_openmp((jit_compiler.ctypes.c_void_p * len(jit_compiler.OPENMP))())
    try:
        own = on(2)
    finally:
        jit_compiler._sharing_threads(library)
        jit_compiler._on_openmp.remove(library)
    assert all(map(torch.equal, one, two))
    assert all(map(torch.equal, one, own))


@pytest.mark.skipif(not jit_compiler.has_openmp(), reason="torch runs on another library of threads here")
def test_shares_are_handed_to_openmp():
    library, seen = batch_norm_kernel.library(torch.bfloat16), []
    ctypes = jit_compiler.ctypes
    work = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
    parallel = ctypes.CFUNCTYPE(None, work, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)(
        lambda function, given, count, _: (seen.append(count), function(given))[0]
    )
    first, all_of_them = ctypes.CFUNCTYPE(ctypes.c_int)(lambda: 0), ctypes.CFUNCTYPE(ctypes.c_int)(lambda: 1)
    functions = [ctypes.cast(f, ctypes.c_void_p).value for f in (parallel, first, all_of_them)]
    torch.set_num_threads(2)
    try:
        wanted = forward()
        library.use_openmp((ctypes.c_void_p * 3)(*functions))
        found = forward()
    finally:
        jit_compiler._sharing_threads(library)
        jit_compiler._on_openmp.remove(library)
    assert seen == [2, 2], "a team for the statistics and one for the rest, of whom one did the shares of two"
    assert all(map(torch.equal, found, wanted))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there are no forks")
def test_a_child_of_a_fork_does_not_wait_for_threads_that_are_gone():
    code = """
        import os, signal, torch
        from amp_graph.passes.backends.cpu.norm import batch_norm_kernel as norm_ops
        torch.set_num_threads(2)
        x, w = torch.randn(8, 256, 16, 16).contiguous(memory_format=torch.channels_last), torch.ones(256)
        given = {low: x.to(low) for low in (torch.bfloat16, torch.float16)}
        run = lambda low: norm_ops.batch_norm_relu(given[low], None, None, None, w, w, 0.1, 1e-5, True)[0]
        (torch.randn(1000, 1000) @ torch.randn(1000, 1000)).sin()
        wanted = run(torch.bfloat16)
        child = os.fork()
        if not child:
            signal.alarm(60)
            run(torch.float16)  # which is loaded in the child
            found = run(torch.bfloat16)
            os._exit(0 if (found.view(torch.int16).numpy() == wanted.view(torch.int16).numpy()).all() else 3)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "0", done.stderr
