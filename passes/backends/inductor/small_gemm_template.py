"""A kernel of ours for small matmuls, which Inductor compiles together with its own.

Before: ``amp_graph::small_product`` in a graph that Inductor lowers, a call into Python.
After: a call of ``small_gemm.c`` with the sizes as arguments, so that one kernel serves all matmuls of a graph.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from amp_graph.passes.native.jit_compiler import HEADER
from amp_graph.passes.native.operator_library import OPS as OPS  # for whoever calls what is defined here
from amp_graph.passes.native.operator_library import define_operator

SOURCE = Path(__file__).with_name("small_gemm.c")
HEADERS = (
    HEADER,
    HEADER.with_name("thread_scratch.h"),
    HEADER.with_name("gemm_tiles.h"),
)  # in include order
FILES = (__file__, str(SOURCE), *map(str, HEADERS))  # the kernel's sources
POINTERS = ("const at::BFloat16*",) * 3 + ("at::BFloat16*",)
NUMBERS = ("const int64_t",) * 12
ENTRY = """
extern "C" void NAME(const at::BFloat16* left, const at::BFloat16* right, const at::BFloat16* bias,
                     at::BFloat16* out, const int64_t has_bias, const int64_t relu, const int64_t rows,
                     const int64_t columns, const int64_t depth, const int64_t a_row, const int64_t a_column,
                     const int64_t b_row, const int64_t b_column, const int64_t a_start, const int64_t b_start,
                     const int64_t bias_start)"""
BODY = """
{
    const Low* added = has_bias ? (const Low*)bias + bias_start : nullptr;
    const Product product = {(const Low*)left + a_start, (const Low*)right + b_start, added, (Low*)out, rows,
                             columns, depth, a_row, a_column, b_row, b_column, (int)relu};
    multiply(&product);
}
"""


def lower_small_products() -> None:
    """Register Inductor's lowering of ``amp_graph::small_product``; for the code generation of 2.13."""
    from torch._inductor import lowering

    if OPS.small_product.default in lowering.lowerings:
        return

    def lowered(left: Any, right: Any, bias: Any, relu: bool) -> Any:
        return _node_type().create(left, right, bias, relu)

    lowering.register_lowering(OPS.small_product.default, type_promotion_kind=None)(lowered)


@lru_cache
def _node_type() -> Any:
    """Return the Inductor node type of such a matmul."""
    from torch._inductor import ir

    class SmallProduct(ir.ExternKernelOut):
        """A matmul whose memory Inductor plans, and whose kernel it compiles, but which it fuses with nothing."""

        relu: bool

        @property
        def operands(self) -> Any:
            return self.inputs

        @classmethod
        def create(cls, left: Any, right: Any, bias: Any, relu: bool) -> Any:
            given = [cls.require_stride1(cls.realize_input(t)) for t in (left, right)]
            given += [] if bias is None else [cls.require_contiguous(cls.realize_input(bias))]
            size = [left.get_size()[0], right.get_size()[1]]
            made = cls(layout=ir.FixedLayout(left.get_device(), left.get_dtype(), size), inputs=given)
            made.relu = relu
            for one in made.operands:
                one.freeze_layout()
            return ir.TensorBox.create(made)

        def codegen(self, wrapper: Any) -> None:
            self.codegen_comment(wrapper)
            numbers = [len(self.operands) > 2, self.relu, *self.get_size(), self.operands[0].get_size()[1]]
            numbers += [*self.operands[0].get_stride(), *self.operands[1].get_stride()]
            given = (*self.operands, *self.operands[:1])[:3]  # any pointer stands for a missing bias
            numbers += [t.get_layout().offset for t in given]
            wrapper.generate_kernel_call(
                _kernel(wrapper),
                [*(t.get_name() for t in given), self.get_name(), *(str(int(n)) for n in numbers)],
                triton=False,
                arg_types=[*POINTERS, *NUMBERS],
                device=self.get_device(),
            )

    return SmallProduct


def source_of(name: str) -> str:
    """Return C++ that defines the kernel under ``name``: pointers and numbers as in ``POINTERS`` and ``NUMBERS``."""
    code = SOURCE.read_text()
    for header in HEADERS:
        code = code.replace(f'#include "{header.name}"', header.read_text())
    return f"#include <torch/csrc/inductor/cpp_prefix.h>\n{code}{ENTRY.replace('NAME', name)}{BODY}"


def _kernel(wrapper: Any) -> str:
    """Return the name of the kernel in the code that is being generated, defined there at its first use."""
    from torch._inductor.virtualized import V

    known: dict[str, str] = wrapper.src_to_kernel
    if ENTRY not in known:
        name = known[ENTRY] = f"cpp_small_product_{wrapper.next_kernel_suffix()}"
        if V.graph.cpp_wrapper:
            declared = ENTRY.replace("NAME", name) + ";\n"
            wrapper.define_kernel(name, source_of(name), gpu=False, cpp_definition=declared)
        else:
            code = f"async_compile.cpp_pybinding({[*POINTERS, *NUMBERS]!r}, r'''\n{source_of('kernel')}''')"
            wrapper.define_kernel(name, code, gpu=False)
    return known[ENTRY]


def _small_product(left: Tensor, right: Tensor, bias: Tensor | None, relu: bool) -> Tensor:
    found = torch.mm(left, right) if bias is None else torch.addmm(bias, left, right)
    return found.relu_() if relu else found


def _fake(left: Tensor, right: Tensor, bias: Tensor | None, relu: bool) -> Tensor:
    return left.new_empty(left.shape[0], right.shape[1])


define_operator("small_product(Tensor left, Tensor right, Tensor? bias, bool relu) -> Tensor", _small_product, _fake)
