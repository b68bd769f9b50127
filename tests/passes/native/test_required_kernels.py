"""Operators of a graph that was traced in another process, in one that has no compiled code for them."""

import pytest

from amp_graph.passes.backends.cpu.attention import attention_functions as attention
from amp_graph.passes.backends.cpu.linear import panel_gemm
from amp_graph.passes.backends.recurrent import lstm_kernel
from amp_graph.passes.native.jit_compiler import CompilerError
from amp_graph.passes.native.operator_library import OPS
from tests.passes.drawn import drawn_low as drawn

HEADS = drawn(1, 2, 8, 16)
MASK = drawn(8, 8)
LSTM = drawn(3, 2, 8), drawn(16, 8), drawn(16, 4), drawn(16), drawn(16), drawn(2, 4), drawn(2, 4), False
CALLS = {
    "attention_forward": (HEADS, HEADS, HEADS, None, False, 1.0),
    "attention_backward": (HEADS, HEADS, HEADS, HEADS, None, False, 1.0),
    "attention_backward_with_mask": (HEADS, HEADS, HEADS, HEADS, MASK, False, 1.0),
    "linear_by_panels": (drawn(4, 16), drawn(32, 16).flatten(), None, False, 32),
    "lstm_forward": LSTM,
}


@pytest.mark.parametrize("name", CALLS)
def test_an_operator_without_compiled_code_says_so(name, monkeypatch):
    for module in (attention.kernel, panel_gemm, lstm_kernel):
        monkeypatch.setattr(module, "library", lambda: None)
    monkeypatch.setattr(attention.kernel, "backward_library", lambda: None)
    said = "traced in another process calls code that this one has not\n  legal: .*\n  fix: "
    with pytest.raises(CompilerError, match=said):
        getattr(OPS, name)(*CALLS[name])
