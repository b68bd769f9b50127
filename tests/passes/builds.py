"""The builds of C that multiplies tile by tile: by dot products, by matrix units, and by an emulation of these."""

import ctypes
import hashlib
import sys
from pathlib import Path

import pytest
import torch

from amp_graph.passes.backends.cpu.linear import amx_gemm, lower_linears, panel_gemm
from amp_graph.passes.native import kernel_table
from amp_graph.passes.native.jit_compiler import FOLDER, CompilerError, load
from amp_graph.passes.native.kernel_table import typed

TILES = Path(__file__).with_name("emulated_tiles.h")
BUILDS = ("matrix units", "emulated units", "dot products")
M_PERTURB, LARGE = -6, 0x80  # malloc.h: fills what is given out with 0x7f, numbers of 3e38


def built(source, name, part=()):
    """The library as it is called, or a skip where this machine cannot have it; ``part``: of it, by macros."""
    if name == "emulated units" and kernel_table.built(panel_gemm.SOURCE):
        version = hashlib.sha256(TILES.read_bytes()).hexdigest()[:8]
        macros = ("-DMATRIX_UNITS", "-include", str(TILES), f"-DEMULATED=0x{version}")
        try:
            return load(source, (*kernel_table.DOT_PRODUCTS, *macros, *part))
        except CompilerError as error:
            pytest.fail(str(error))
    found = kernel_table.built(source, *(kernel_table.MATRIX_UNITS if name == "matrix units" else ()), part=part)
    return found or pytest.skip(f"needs a C compiler, and a CPU for {name}")


@pytest.fixture(params=[*BUILDS, *(f"amx, {name}" for name in BUILDS[:2])])
def every_build(request, monkeypatch):
    """What small linears are multiplied by, in each of its builds."""
    if request.param.startswith("amx"):
        found = typed(built(amx_gemm.SOURCE, request.param.removeprefix("amx, ")), amx_gemm.FUNCTIONS)
        monkeypatch.setattr(lower_linears, "MOST_OF_A_CALL", 0)
        monkeypatch.setattr(amx_gemm, "amx_product_is_profitable", lambda *sizes: True)
    else:
        library, found = typed(built(panel_gemm.SOURCE, request.param), panel_gemm.FUNCTIONS), None
        monkeypatch.setattr(panel_gemm, "library", lambda: library)
    monkeypatch.setattr(amx_gemm, "library", lambda: found)


def assert_rounded_once(found, a, b, bias=None, relu=False):
    """``a @ b + bias`` in bf16: within a rounding of the exact result, and what fp32 sums may be off."""
    exact, sizes = a.double() @ b.double(), a.double().abs() @ b.double().abs()
    if bias is not None:
        exact, sizes = exact + bias.double(), sizes + bias.double().abs()
    exact = exact.relu() if relu else exact
    assert (found.dtype, found.shape) == (torch.bfloat16, exact.shape)
    assert found.is_contiguous()
    assert ((found.double() - exact).abs() <= exact.abs() * 2**-8 + sizes * (a.shape[-1] + 2) * 2**-24).all()


def forget_libraries():
    """Have each kernel loaded anew."""
    load.cache_clear()
    for name, module in list(sys.modules.items()):
        if name.startswith("amp_graph.passes.") and hasattr(getattr(module, "library", None), "cache_clear"):
            module.library.cache_clear()


@pytest.fixture
def no_compiler(monkeypatch):
    """A machine where nothing can be compiled, and nothing is kept that was."""
    monkeypatch.setenv("CC", "no-such-compiler")
    monkeypatch.setenv(FOLDER, "/nonexistent")
    forget_libraries()
    yield
    forget_libraries()


def perturbed():
    """A fixture that lets what a kernel reads before it has written it be seen."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_PERTURB, LARGE)
    yield
    if mallopt is not None:
        mallopt(M_PERTURB, 0)


memory_that_is_not_zero = pytest.fixture(autouse=True)(perturbed)
