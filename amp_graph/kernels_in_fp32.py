"""Operations without a kernel in low precision, in code that escapes capture: they run in fp32 there.

Before: ``torch.special.zeta(h, 2)`` behind a graph break, ``h`` in bf16: ``torch.autocast`` has no rule for it, and it
raises "not implemented for 'BFloat16'". After: ``torch.special.zeta(h.float(), 2)``, as by autocast's rules for fp32.

Dynamo runs what escapes as it was written, so the rules are where autocast has its own: kernels of its dispatch key.
Outside of escaped code they call what is below them, as if they were not there.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from amp_graph.passes.torch_private import (
    OpOverload,
    call_below_autocast,
    dispatch_has_kernel,
    number_of_backward,
    returns_its_argument,
    without_rules_of_autocast,
    written_places,
)

HALVES = frozenset({torch.bfloat16, torch.float16})
# Without a kernel on any device, forward or backward (i1, i1e, pdist).
NOWHERE = (
    "linalg_det", "det", "linalg_slogdet", "slogdet", "logdet", "linalg_lu", "linalg_lu_factor", "linalg_lu_factor_ex",
    "linalg_lu_solve", "linalg_ldl_factor", "linalg_ldl_factor_ex", "linalg_ldl_solve", "linalg_solve_ex",
    "linalg_solve_triangular", "linalg_pinv", "linalg_vander", "nuclear_norm",
    "linalg_matrix_norm", "linalg_norm.ord_str", "pdist", "histogram", "histogramdd", "complex",
    "fft_hfft2", "fft_hfftn", "fft_ihfft2", "fft_ihfftn",
    "special_airy_ai", "special_bessel_j0", "special_bessel_j1", "special_bessel_y0", "special_bessel_y1",
    "special_chebyshev_polynomial_t", "special_chebyshev_polynomial_u", "special_chebyshev_polynomial_v",
    "special_chebyshev_polynomial_w", "special_erfcx", "special_hermite_polynomial_h", "special_hermite_polynomial_he",
    "special_i1", "special_i1e", "special_laguerre_polynomial_l", "special_legendre_polynomial_p", "special_log_ndtr",
    "special_modified_bessel_i0", "special_modified_bessel_i1", "special_modified_bessel_k0",
    "special_modified_bessel_k1", "special_ndtri", "special_scaled_modified_bessel_k0",
    "special_scaled_modified_bessel_k1", "special_shifted_chebyshev_polynomial_t",
    "special_shifted_chebyshev_polynomial_u", "special_shifted_chebyshev_polynomial_v",
    "special_shifted_chebyshev_polynomial_w", "special_spherical_bessel_j0", "special_zeta",
)  # fmt: skip
MISSING: dict[str, dict[str, frozenset[torch.dtype]]] = {
    "cpu": {
        **dict.fromkeys(NOWHERE, HALVES),
        **dict.fromkeys(("_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa", "_upsample_lanczos2d_aa"), HALVES),
        **dict.fromkeys(("rrelu", "rrelu_", "rrelu_with_noise", "rrelu_with_noise_"), frozenset({torch.float16})),
    },
    "cuda": dict.fromkeys(NOWHERE, HALVES),
}

_registered: dict[str, tuple[OpOverload, ...]] = {}
_libraries: list[torch.library.Library] = []  # kernels are there for as long as the library is
_lock = threading.Lock()


def widen_where_no_kernel(kind: str, is_escaped: Callable[[], bool]) -> tuple[OpOverload, ...]:
    """Give autocast for devices of ``kind`` the rules that it lacks, for where ``is_escaped``; return for what.

    Those of the first call stay. A rule that torch has itself stays as it is.
    """
    if kind in _registered:
        return _registered[kind]
    with _lock:
        if kind not in _registered:
            _registered[kind] = tuple(_register(kind, is_escaped))
    return _registered[kind]


def rules_of_ours(kind: str) -> tuple[OpOverload, ...]:
    """Return the operations that autocast for devices of ``kind`` has got rules for from here."""
    return _registered.get(kind, ())


def _register(kind: str, is_escaped: Callable[[], bool]) -> list[OpOverload]:
    key, done = f"Autocast{kind.upper()}", []
    library = torch.library.Library("aten", "IMPL")
    _libraries.append(library)
    for name, dtypes in MISSING.get(kind, {}).items():
        for op in _overloads(name):
            if not dispatch_has_kernel(op, key):
                library.impl(op, partial(_rule, op, kind, dtypes, is_escaped), key, with_keyset=True)
                done.append(op)
    return done


def _overloads(name: str) -> list[OpOverload]:
    """Return the overloads of a packet, or the one that ``name`` says, but for those that write into ``out=``."""
    packet_name, _, only = name.partition(".")
    packet = getattr(torch.ops.aten, packet_name, None)  # not all are in each torch
    names = [o for o in (packet.overloads() if packet is not None else ()) if "out" not in o]
    return [getattr(packet, o) for o in names if o == (only or o)]


def _rule(
    op: OpOverload,
    kind: str,
    dtypes: frozenset[torch.dtype],
    is_escaped: Callable[[], bool],
    keys: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Call ``op`` on fp32 copies of what is in ``dtypes``; what it writes is written back."""
    wide: dict[int, Tensor] = {}

    def widened(tensor: Tensor) -> Tensor:
        if tensor.dtype not in dtypes or tensor.device.type != kind:
            return tensor
        return wide.setdefault(id(tensor), tensor.float())

    if is_escaped() or number_of_backward() >= 0:  # a checkpoint is computed again in a backward pass
        wide_args, wide_kwargs = tree_map_only(Tensor, widened, (args, kwargs))
    if not wide:
        return call_below_autocast(op, keys, args, kwargs)
    with without_rules_of_autocast():
        found = op(*wide_args, **wide_kwargs)
        for place in written_places(op):
            given = args[place] if place < len(args) else kwargs[op._schema.arguments[place].name]
            if id(given) in wide:
                given.copy_(wide[id(given)])
    return args[0] if returns_its_argument(op) else found
