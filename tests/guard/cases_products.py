"""Products of matrices between guard pages: panels, matrix units, and recurrent layers."""

import torch
import torch.nn.functional as F
from torch import nn

from amp_graph.passes.backends.cpu.linear import amx_gemm, panel_gemm
from tests.guard.case import BF16, SIZES, drawn, op, over, same

ROWS = (*SIZES, 16, 130)
EDGES = (0, 1, 3, 17, 32, 33, 65)
LAYOUTS = ("rows", "columns")


def laid(rows, columns, how, scale=1.0):
    """A matrix with elements side by side in its rows, or in its columns; one row apart more than it has, if odd."""
    first, second = (rows, columns) if how == "rows" else (columns, rows)
    made = drawn(first, second, scale=scale)
    return made if how == "rows" else made.t()


@over(tiled=True, rows=ROWS, depth=EDGES, columns=EDGES, biased=(True, False))
def panels(rows, depth, columns, biased):
    x, weight = drawn(rows, depth), drawn(columns, depth, scale=0.3)
    bias = drawn(columns) if biased else None
    laid_out = panel_gemm.panels_of(weight)
    same(panel_gemm.dense_of(laid_out, columns, depth), weight, 0.0, "the weight")
    found = op("linear_by_panels")(x, laid_out, bias, True, columns)
    wanted = x.double() @ weight.double().t() + (0 if bias is None else bias.double())
    same(found, wanted.relu(), 2.0**-7)


@over(tiled=True, rows=ROWS, depth=EDGES, columns=EDGES, a=LAYOUTS, b=LAYOUTS, biased=(True, False))
def products(rows, depth, columns, a, b, biased):
    left, right = laid(rows, depth, a), laid(depth, columns, b, 0.3)
    bias = drawn(columns) if biased else None
    wanted = left.double() @ right.double() + (0 if bias is None else bias.double())
    same(op("product_low")(left, right, bias), wanted, 2.0**-7)
    same(op("amx_product")(left, right, bias), wanted, 2.0**-7)


@over(tiled=True, rows=(0, 1, 33, 65), depth=(0, 1, 31, 257), columns=(0, 3, 33, 65))
def products_and_sums(rows, depth, columns):
    a, b = drawn(depth, rows), drawn(depth, columns)
    product, sums = op("amx_product_and_sums")(a, b)
    same(product, a.double().t() @ b.double(), 2.0**-7)
    same(sums, a.double().sum(0), 2.0**-7, "sums")


@over(tiled=True, sizes=((400, 40, 33), (33, 700, 70), (70, 33, 6200)), a=LAYOUTS, b=LAYOUTS)
def large_products(sizes, a, b):
    """More than one block of rows, of columns, and of the depth."""
    rows, columns, depth = sizes
    if amx_gemm.library() is None:
        return
    left, right = laid(rows, depth, a), laid(depth, columns, b, 0.1)
    same(op("amx_product")(left, right), left.double() @ right.double(), 2.0**-7)


# -- recurrent layers ------------------------------------------------------------------------------------------------

LAYERS = {"length": (1, 3, 20), "batch": (0, 1, 3, 17), "width": (1, 16, 33), "size": (1, 16, 17, 33)}


def _layer(kind, width, size, length, batch):
    module = kind(width, size)
    for p in module.parameters():
        p.data = drawn(*p.shape, scale=0.2).double()
    states = [drawn(batch, size), drawn(batch, size)]
    return module.double(), drawn(length, batch, width), [p.detach().to(BF16) for p in module.parameters()], states


def _exact(module, x, states, grads, reverse):
    """Output, last states and gradients in fp64: of x, weights, biases, first states."""
    given = [x.double().requires_grad_(), *(s.double().requires_grad_() for s in states)]
    with torch.enable_grad():
        seen = given[0].flip(0) if reverse else given[0]
        firsts = tuple(s[None] for s in given[1:])
        out, lasts = module(seen, firsts if len(firsts) > 1 else firsts[0])
        lasts = [s[0] for s in (lasts if len(firsts) > 1 else (lasts,))]
        out = out.flip(0) if reverse else out
        params = list(module.parameters())
        found = torch.autograd.grad([out, *lasts], [given[0], *params, *given[1:]], [g.double() for g in grads])
    return [out, *lasts], found


@over(tiled=True, **LAYERS, reverse=(True, False))
def lstm(length, batch, width, size, reverse):
    module, x, params, states = _layer(nn.LSTM, width, size, length, batch)
    grads = [drawn(length, batch, size), *(drawn(batch, size, scale=0.5) for _ in range(2))]
    wanted, exact = _exact(module, x, states, grads, reverse)
    out, h, c, *kept = op("lstm_forward")(x, *params, *states, reverse)
    for one, other in zip((out, h, c), wanted, strict=True):
        same(one, other.detach(), 2.0**-5)
    w_ih, w_hh, *_ = params
    made = op("lstm_backward_of_sums")(*grads, x, w_ih, w_hh, states[0], out, *kept, reverse)
    for name, one, other in zip(("x", "w_ih", "w_hh", "b_ih", "b_hh", "h", "c"), made, exact, strict=True):
        same(one, other, 2.0**-4, name)


@over(tiled=True, **LAYERS, reverse=(True, False))
def gru(length, batch, width, size, reverse):
    module, x, params, (state, _) = _layer(nn.GRU, width, size, length, batch)
    grads = [drawn(length, batch, size), drawn(batch, size, scale=0.5)]
    wanted, exact = _exact(module, x, [state], grads, reverse)
    out, last, states, gates = op("gru_forward")(x, *params, state, reverse)
    for one, other in zip((out, last), wanted, strict=True):
        same(one, other.detach(), 2.0**-5)
    made = op("gru_backward")(*grads, x, *params[:2], states, gates, reverse)
    for name, one, other in zip(("x", "w_ih", "w_hh", "b_ih", "b_hh", "h"), made, exact, strict=True):
        same(one, other, 2.0**-4, name)


@over(rows=ROWS, classes=(1, 3, 16, 33, 4099), low=(BF16, torch.float16), ignored=(True, False), others=(True, False))
def cross_entropy(rows, classes, low, ignored, others):
    logits = drawn(rows, classes, dtype=low, scale=2)
    target = torch.arange(rows) * 7 % classes
    if ignored:
        target[::3] = -100
    exact = logits.double().requires_grad_()
    grad, wide = drawn(rows, dtype=torch.float32), drawn(rows, classes, dtype=torch.float32) if others else None
    with torch.enable_grad():
        losses = F.cross_entropy(exact, target, reduction="none")
        (wanted,) = torch.autograd.grad(losses, exact, grad.double())
    wanted = wanted if wide is None else wanted + wide.double()
    same(op("cross_entropy_rows")(logits, target, -100), losses.detach(), 2.0**-14)
    same(op("cross_entropy_backward")(grad, logits, target, wide, -100), wanted)
    same(op("cross_entropy_backward_")(grad, logits, target, wide, -100), wanted, what="in place")
