"""Compiles the C kernels that a model may need in background threads during its capture; reports missing ones.

Before: passes wait for the C compiler, up to a second per source. After ``compile_ahead(model, low, trains=True)``:
capture, which takes longer, and compilation overlap.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Iterable

import torch
from torch import nn

from amp_graph.errors import warn
from amp_graph.passes.native.code_cache import FIX
from amp_graph.passes.native.gemm_thresholds import amx_product_is_profitable, lstm_kernel_is_profitable
from amp_graph.passes.native.jit_compiler import CompilerError, why_refused
from amp_graph.passes.native.kernel_table import load_kernel
from amp_graph.passes.torch_compat.devices import cpu_has_bf16
from amp_graph.passes.torch_compat.modules import plain_attribute, weights_of

Library = Callable[[], object]
THREAD = "amp_graph compiles"
COMPILERS = 2  # at a time: more would delay the kernels that are needed first
MANY_ROWS = 4096  # sizes that batches may have
MANY_CLASSES = 4096  # outputs of a linear that looks like a language-model head: its loss uses our kernel
WARNS = True  # whether missing kernels are reported; tests that remove the compiler turn it off
_warned: set[str] = set()  # reasons, once per process
_begun: set[str] = set()  # what this process has compiled or is compiling


def compile_ahead(model: nn.Module, low: torch.dtype, *, trains: bool) -> list[threading.Thread]:
    """Start threads that compile the kernels that CPU graphs of ``model`` may call; return the threads.

    ``trains``: the kernels of backward as well.
    """
    if not cpu_has_bf16() or any(p.device.type != "cpu" for p in model.parameters()):
        return []
    parts = list(model.modules())
    found = dict((*_wanted(parts, low), *(_wanted_to_train(parts, low) if trains else ())))
    wanted = [(name, library) for name, library in found.items() if name not in _begun]
    _begun.update(name for name, _ in wanted)
    left: queue.SimpleQueue[Library] = queue.SimpleQueue()
    for _, library in wanted:
        left.put(library)
    threads = [
        threading.Thread(target=_load, args=(left,), name=THREAD, daemon=True)
        for _ in range(min(COMPILERS, len(wanted)))
    ]
    for thread in threads:
        thread.start()
    return threads


def _load(left: queue.SimpleQueue[Library]) -> None:
    with contextlib.suppress(queue.Empty):
        while True:
            library = left.get_nowait()
            with contextlib.suppress(CompilerError):  # reported where the kernel is used
                library()


def _wanted(parts: list[nn.Module], low: torch.dtype) -> Iterable[tuple[str, Library]]:
    """Yield the names and loaders of the kernels that a model's modules need, in order of need."""
    linears = [part for part in parts if isinstance(part, nn.Linear)]
    if linears and low == torch.bfloat16:
        yield "linears", _loader("panel_gemm", low)  # which the planner needs
    if linears and _has_norms(parts) and low == torch.bfloat16:
        yield "attention", _loader("attention", low)  # takes longest


def _loader(kernel: str, low: torch.dtype) -> Library:
    return lambda: load_kernel(kernel, low)


def _has_norms(parts: Iterable[nn.Module]) -> bool:
    return any(type(part).__name__.lower().endswith(("layernorm", "rmsnorm")) for part in parts)


def _wanted_to_train(parts: list[nn.Module], low: torch.dtype) -> Iterable[tuple[str, Library]]:
    """Yield the kernels of training: of forward with gradients, and of backward."""
    linears = [part for part in parts if isinstance(part, nn.Linear)]
    if linears and _has_norms(parts) and low == torch.bfloat16:
        yield "attention's backward", _loader("attention_backward", low)
    widths = [int(_number(part, "hidden_size")) for part in parts if isinstance(part, nn.LSTM)]
    if any(lstm_kernel_is_profitable("cpu", low, 1, width) for width in widths):
        yield "lstm", _loader("lstm", low)
    if any(isinstance(part, nn.modules.batchnorm._BatchNorm) for part in parts):
        yield f"batch norms, {low}", _loader("batch_norm", low)
    convolutions = [part for part in parts if isinstance(part, nn.Conv1d | nn.Conv2d)]
    if any(1 < _number(part, "groups") == _number(part, "in_channels") for part in convolutions):
        yield f"depthwise, {low}", _loader("depthwise_conv", low)
    if _has_many_outputs(linears):
        yield f"cross entropy, {low}", _loader("cross_entropy", low)
    weights = (w for part in parts if isinstance(part, nn.Linear | nn.Conv2d) for w in weights_of(part) if w.numel())
    if any(amx_product_is_profitable("cpu", low, MANY_ROWS, len(w), w.numel() // len(w)) for w in weights):
        yield "amx products", _loader("amx_gemm", low)


def _has_many_outputs(linears: Iterable[nn.Linear]) -> bool:
    return any(_number(linear, "out_features") >= MANY_CLASSES for linear in linears)


def _number(part: nn.Module, name: str) -> float:
    """Return an integer option of ``part``; 0 if a subclass stores something else."""
    found = plain_attribute(part, name)
    return found if isinstance(found, int | float) else 0


def warn_of_missing_kernels() -> None:
    """Warn of each new reason for which kernels could not be compiled or loaded."""
    for why, names in why_refused().items():
        if WARNS and why not in _warned:
            _warned.add(why)
            warn(
                f"amp_graph: torch's kernels run in place of compiled ones ({', '.join(names)}), which is slower: "
                f"{why}\n"
                f"  fix:   install gcc or clang, or set CC; a folder that can be written: {FIX}"
            )
