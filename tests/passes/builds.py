"""The builds of C that multiplies tile by tile: by dot products, by matrix units, and by an emulation of these."""

import ctypes
import hashlib
from pathlib import Path

import pytest
import torch

from amp_graph.passes import amx_product, linear_kernel, linear_low, tiled_code
from amp_graph.passes.native_code import CompilerError, load

TILES = Path(__file__).with_name("emulated_tiles.h")
BUILDS = ("matrix units", "emulated units", "dot products")
M_PERTURB, LARGE = -6, 0x80  # malloc.h: fills what is given out with 0x7f, numbers of 3e38


def built(source, name, part=()):
    """The library as it is called, or a skip where this machine cannot have it; ``part``: of it, by macros."""
    if name == "emulated units" and tiled_code.built(linear_kernel.SOURCE):
        version = hashlib.sha256(TILES.read_bytes()).hexdigest()[:8]
        macros = ("-DMATRIX_UNITS", "-include", str(TILES), f"-DEMULATED=0x{version}")
        try:
            return load(source, (*tiled_code.DOT_PRODUCTS, *macros, *part))
        except CompilerError as error:
            pytest.fail(str(error))
    found = tiled_code.built(source, *(tiled_code.MATRIX_UNITS if name == "matrix units" else ()), part=part)
    return found or pytest.skip(f"needs a C compiler, and a CPU for {name}")


@pytest.fixture(params=[*BUILDS, "amx product"])
def every_build(request, monkeypatch):
    """What small linears are multiplied by, in each of its builds."""
    if request.param == "amx product":
        found = amx_product.typed(built(amx_product.SOURCE, "matrix units"))
        monkeypatch.setattr(linear_low, "MOST_OF_A_CALL", 0)
    else:
        library, found = linear_kernel.typed(built(linear_kernel.SOURCE, request.param)), None
        monkeypatch.setattr(linear_kernel, "library", lambda: library)
    monkeypatch.setattr(amx_product, "library", lambda: found)


INSTRUCTIONS = ("as torch", "AVX2", "DEFAULT")


def compile_for(instructions, monkeypatch):
    """Have C compiled for a CPU with these instructions, or skip; say whether they are others than torch's."""
    if instructions == "as torch":
        return False
    if instructions == "AVX2" and torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"):
        pytest.skip("a CPU without AVX2")
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: instructions)
    return True


def perturbed():
    """A fixture that lets what a kernel reads before it has written it be seen."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_PERTURB, LARGE)
    yield
    if mallopt is not None:
        mallopt(M_PERTURB, 0)


memory_that_is_not_zero = pytest.fixture(autouse=True)(perturbed)
