"""What random programs are made of: operations, views of every kind torch has, writes, and casts of the user's.

Every entry takes tensors of any shape and dtype and may refuse them, by raising as torch does: a generator drops what
eager PyTorch refuses. What is fp32 is told by its size: reading a tensor's ``dtype`` has a graph captured again, under
autocast, and every program would be such a one. Nothing here depends on the rounding of a computed value: masks and
indices come from inputs.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F

ROWS, WIDTH = 4, 8
KEEPS_LOW = False  # whether ``fit`` leaves what autocast made low as it is


def fit(x: Any) -> Any:
    """Return ``x`` as fp32 [ROWS, WIDTH], sharing its memory where a view can do it; see ``KEEPS_LOW``."""
    if x.is_complex():
        x = torch.view_as_real(x)
    if not x.is_floating_point():
        x = x.view(torch.float32) if x.element_size() == 4 else x.float()
    if x.element_size() != 4 and not (KEEPS_LOW and x.element_size() == 2):
        x = x.float()
    if x.shape == (ROWS, WIDTH):
        return x
    return _sized(x.reshape(-1), ROWS * WIDTH).view(ROWS, WIDTH)


def like(source: Any, target: Any) -> Any:
    """Return the values of ``source`` in the shape and dtype of ``target``."""
    made = _sized(fit(source).reshape(-1), target.numel()).reshape(target.shape)
    same = target.is_floating_point() and target.element_size() == 4
    return made if same else made.to(target.dtype)


def _sized(flat: Any, count: int) -> Any:
    have = flat.numel()
    if have == 0:
        raise ValueError("nothing to repeat")
    return flat[:count] if have >= count else flat.repeat(-(-count // have))[:count]


def _images(x: Any) -> Any:
    return x.view(1, ROWS, WIDTH)


def _attention(m: Any, x: Any, y: Any) -> Any:
    q, k = x.view(1, 2, 2, WIDTH), y.view(1, 2, 2, WIDTH)
    return F.scaled_dot_product_attention(q, k, q).view(ROWS, WIDTH)


def _chunks(m: Any, x: Any, y: Any) -> Any:
    q, k, v = F.linear(x, m.wide).chunk(3, -1)
    return (q @ k.transpose(-1, -2) / 3).softmax(-1) @ v


def _gated(m: Any, x: Any, y: Any) -> Any:
    a, b = torch.cat([x, y], -1).split(WIDTH, -1)
    return F.silu(a) * b


def _without_autocast(m: Any, x: Any, y: Any) -> Any:
    with torch.autocast("cpu", enabled=False):
        return F.linear(x.float(), m.first.weight)


def _without_gradients(m: Any, x: Any, y: Any) -> Any:
    with torch.no_grad():
        gate = torch.sigmoid(m.second(x))
    return y * gate


def _without_versions(x: Any) -> Any:
    """Return ``x`` for a view with a version counter of its own, which hides writes from autograd's checks."""
    if torch.is_grad_enabled():
        raise RuntimeError("a write through this view would be unseen by autograd")
    return x


# Of the module, and of two values of shape [ROWS, WIDTH].
OPERATIONS = {
    "first": lambda m, x, y: m.first(x),
    "second": lambda m, x, y: m.second(x),
    "tied": lambda m, x, y: m.tied(x),
    "tied_transposed": lambda m, x, y: x @ m.first.weight,
    "matmul": lambda m, x, y: x @ m.square,
    "product": lambda m, x, y: x @ y.transpose(0, 1) @ x / 8,
    "addmm": lambda m, x, y: torch.addmm(y, x, m.square),
    "einsum": lambda m, x, y: torch.einsum("ij,kj->ik", x, m.square),
    "conv": lambda m, x, y: m.conv(_images(x)).view(ROWS, WIDTH),
    "pointwise": lambda m, x, y: m.pointwise(x.view(1, ROWS, 2, 4)).view(ROWS, WIDTH),
    "norm": lambda m, x, y: m.norm(x),
    "batch_norm": lambda m, x, y: m.batch_norm(x),
    "attention": _attention,
    "chunks": _chunks,
    "gated": _gated,
    "relu": lambda m, x, y: torch.relu(x),
    "gelu": lambda m, x, y: F.gelu(x),
    "tanh": lambda m, x, y: torch.tanh(x),
    "softmax": lambda m, x, y: x.softmax(-1),
    "exp": lambda m, x, y: torch.exp(-x.abs()),
    "mean": lambda m, x, y: x - x.mean(-1, keepdim=True),
    "add": lambda m, x, y: x + y,
    "mul": lambda m, x, y: x * torch.tanh(y),
    "residual": lambda m, x, y: x + m.second(y),
    "where": lambda m, x, y: torch.where(m.mask, x, y),
    "stack": lambda m, x, y: torch.stack([x, y], 1).sum(1),
    "gather": lambda m, x, y: x[m.index],
    "clone": lambda m, x, y: x.clone(),
    "eval_dropout": lambda m, x, y: F.dropout(x, 0.5, False),
    "held": lambda m, x, y: x + m.held,
    "autocast_off": _without_autocast,
    "no_grad": _without_gradients,
}

CASTS = {
    "float": lambda x: x.float(),
    "half": lambda x: x.half(),
    "bfloat16": lambda x: x.bfloat16(),
    "to_float": lambda x: x.to(torch.float32),
    "to_double": lambda x: x.to(torch.float64),
    "type": lambda x: x.type(torch.float32),
    "there_and_back": lambda x: x.bfloat16().float(),
    "copied": lambda x: x.to(torch.float32, copy=True),
}

VIEWS = {
    "as_strided": lambda x: x.as_strided((2, 4), (8, 1)),
    "as_strided_from": lambda x: x.as_strided((3, 5), (5, 1), 2),
    "torch.as_strided": lambda x: torch.as_strided(x, (2, 8), (16, 1)),
    "real": lambda x: x.real,
    "complex_real": lambda x: torch.view_as_complex(fit(x).view(ROWS, 4, 2)).real,
    "complex_imag": lambda x: torch.view_as_complex(fit(x).view(ROWS, 4, 2)).imag,
    "complex": lambda x: torch.view_as_complex(x.reshape(-1, 2)),
    "complex_and_back": lambda x: torch.view_as_real(torch.view_as_complex(x.reshape(-1, 2))),
    "sum_to_size": lambda x: x.sum_to_size(x.shape),
    "expand_as": lambda x: x.expand_as(x),
    "expand": lambda x: x.expand(x.shape),
    "broadcast_to": lambda x: x.broadcast_to(x.shape),
    "broadcast_tensors": lambda x: torch.broadcast_tensors(x, x.detach())[0],
    "int32": lambda x: x.view(torch.int32),
    "float32": lambda x: x.view(torch.float32),
    "int32_and_back": lambda x: x.view(torch.int32).view(torch.float32),
    "contiguous": lambda x: x.contiguous(),
    "transposed_contiguous": lambda x: x.mT.contiguous(),
    "to": lambda x: x.to(torch.float32),
    "to_device": lambda x: x.to("cpu"),
    "type_as": lambda x: x.type_as(x),
    "narrow": lambda x: x.narrow(-1, 1, 2),
    "unfold": lambda x: x.unfold(-1, 2, 2),
    "diagonal": lambda x: x.diagonal(),
    "T": lambda x: x.T,
    "mT": lambda x: x.mT,
    "adjoint": lambda x: x.adjoint(),
    "transpose": lambda x: x.transpose(0, -1),
    "permute": lambda x: x.permute(tuple(reversed(range(x.dim())))),
    "movedim": lambda x: x.movedim(0, -1),
    "squeeze": lambda x: x.squeeze(),
    "unsqueeze": lambda x: x.unsqueeze(0),
    "split": lambda x: x.split(2, -1)[-1],
    "split_sizes": lambda x: torch.split(x, [1, x.shape[-1] - 1], -1)[1],
    "chunk": lambda x: x.chunk(2, -1)[0],
    "unbind": lambda x: x.unbind(0)[-1],
    "tensor_split": lambda x: torch.tensor_split(x, 3, -1)[1],
    "hsplit": lambda x: torch.hsplit(x, 2)[1],
    "unsafe_chunk": lambda x: _without_versions(x).unsafe_chunk(2, -1)[0],
    "detach": lambda x: x.detach(),
    "alias": lambda x: torch.ops.aten.alias(x),
    "reshape": lambda x: x.reshape(-1),
    "reshape_rows": lambda x: x.reshape(WIDTH, -1),
    "view": lambda x: x.view(-1),
    "view_as": lambda x: x.view_as(x.reshape(2, -1)),
    "unsafe_view": lambda x: torch.ops.aten._unsafe_view(_without_versions(x), (x.numel(),)),
    "flatten": lambda x: x.flatten(),
    "ravel": lambda x: x.ravel(),
    "unflatten": lambda x: x.unflatten(-1, (2, -1)),
    "atleast_3d": lambda x: torch.atleast_3d(x),
    "slice": lambda x: x[1:],
    "select": lambda x: x[0],
    "steps": lambda x: x[..., ::2],
    "ellipsis": lambda x: x[..., :3],
    "new_axis": lambda x: x[:, None],
    "einsum": lambda x: torch.einsum("ij->ji", x),
    "eval_dropout": lambda x: F.dropout(x, 0.5, False),
    "no_dropout": lambda x: F.dropout(x, 0.0),
    "no_padding": lambda x: F.pad(x, (0, 0)),
    "resolve_conj": lambda x: x.resolve_conj(),
    "identity": lambda x: torch.nn.Identity()(x),
    "set": lambda x: torch.empty(0).set_(_without_versions(x)),
    "meshgrid": lambda x: torch.meshgrid(x.reshape(-1)[:4], x.detach().reshape(-1)[:3], indexing="ij")[0],
    "same": lambda x: x,
}


def _set_row(m: Any, t: Any, s: Any) -> None:
    t[0] = s[0].clone()


def _set_masked(m: Any, t: Any, s: Any) -> None:
    t[like(m.mask.float(), t) > 0] = 0.25


def _add_slice(m: Any, t: Any, s: Any) -> None:
    t[..., 1:] += s[..., 1:]


def _out(m: Any, t: Any, s: Any) -> None:
    torch.add(s, 0.5, out=t)


def _out_matmul(m: Any, t: Any, s: Any) -> None:
    torch.mm(s.clone(), m.square, out=t)


# Of the module, the tensor that is written, and a value of its shape and dtype, which may be a view of the same memory:
# a copy where torch does not say what a write to an operand of its own gives.
WRITES = {
    "mul_": lambda m, t, s: t.mul_(-0.5),
    "add_": lambda m, t, s: t.add_(0.75),
    "add_source": lambda m, t, s: t.add_(s),
    "mul_source": lambda m, t, s: t.mul_(torch.tanh(s)),
    "copy_": lambda m, t, s: t.copy_(s.clone()),
    "fill_": lambda m, t, s: t.fill_(0.5),
    "zero_": lambda m, t, s: t.zero_(),
    "relu_": lambda m, t, s: t.relu_(),
    "F.relu": lambda m, t, s: F.relu(t, inplace=True),
    "tanh_": lambda m, t, s: t.tanh_(),
    "clamp_": lambda m, t, s: t.clamp_(-0.5, 0.5),
    "exp_": lambda m, t, s: t.clamp_(-2.0, 1.0).exp_(),
    "neg_": lambda m, t, s: t.neg_(),
    "lerp_": lambda m, t, s: t.lerp_(s, 0.25),
    "addcmul_": lambda m, t, s: t.addcmul_(s, s, value=0.25),
    "masked_fill_": lambda m, t, s: t.masked_fill_(like(m.mask.float(), t) > 0, 0.5),
    "index_put_": lambda m, t, s: t.index_put_((torch.tensor([0, 1]),), s[:2]),
    "index_add_": lambda m, t, s: t.index_add_(0, torch.tensor([0, 1]), s[:2]),
    "index_fill_": lambda m, t, s: t.index_fill_(0, torch.tensor([1]), 0.5),
    "set_row": _set_row,
    "set_masked": _set_masked,
    "add_slice": _add_slice,
    "addmm_": lambda m, t, s: t.addmm_(s.clone(), m.square),
    "flip_signs": lambda m, t, s: t.view(torch.int32).bitwise_xor_(-(1 << 31)),
    "int_fill": lambda m, t, s: t.view(torch.int32).fill_(1065353216),
    "turn": lambda m, t, s: torch.view_as_complex(t.view(-1, 2)).mul_(1j),
    "out": _out,
    "out_matmul": _out_matmul,
    "detached": lambda m, t, s: t.detach().mul_(2.0),
    "held": lambda m, t, s: m.held.add_(like(t.detach(), m.held)),
    "held_copy": lambda m, t, s: m.held.copy_(like(t.detach(), m.held)),
}

# Views and writes that are others where their operand is of low precision.
DTYPED = frozenset(
    "real complex_real complex_imag complex complex_and_back int32 float32 int32_and_back to type_as set"
    " flip_signs int_fill turn".split()
)

# Shapes that depend on values; of the module and one value of shape [ROWS, WIDTH].
DATA_DEPENDENT = {
    "rows_of_mask": lambda m, x: x[m.rows] * 1.0,
    "column_of_rows": lambda m, x: x[m.rows][:, 0],
    "masked_select": lambda m, x: torch.masked_select(x, m.mask),
    "sum_of_masked": lambda m, x: x[m.mask].sum()[None],
    "nonzero": lambda m, x: x[torch.nonzero(m.rows)[:, 0]],
    "first_n": lambda m, x: x[: int(m.count)],
    "unique": lambda m, x: x[: torch.unique(m.index).numel()],
    "linear_of_rows": lambda m, x: m.first(x[m.rows]).relu(),
}


def finite(x: Any) -> bool:
    """Say whether all of ``x`` is finite and small enough for any precision to hold it."""
    real = torch.view_as_real(x) if x.is_complex() else x
    if not real.is_floating_point():
        return True
    top = real.detach().abs().max().item() if real.numel() else 0.0
    return math.isfinite(top) and top < 100.0
