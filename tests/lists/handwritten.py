"""Samples for the operators which have no OpInfo, or whose OpInfo calls them with other arguments."""

from __future__ import annotations

from collections.abc import Callable

import torch


def x(*shape: int) -> torch.Tensor:
    return (torch.rand(shape) + 0.1).requires_grad_()


def fixed(*shape: int) -> torch.Tensor:
    """Return a tensor that takes no gradient: a buffer, or an operand without a derivative."""
    return x(*shape).detach()


def index(*values: int) -> torch.Tensor:
    return torch.tensor(values)


def rnn(gates: int, *, is_lstm: bool = False, batch_sizes: bool = False) -> tuple:
    weights = [x(gates * 4, 3), x(gates * 4, 4), x(gates * 4), x(gates * 4)]
    state = [x(1, 2, 4), x(1, 2, 4)] if is_lstm else x(1, 2, 4)
    if batch_sizes:
        return x(10, 3), index(2, 2, 2, 2, 2), state, weights, True, 1, 0.0, True, False
    return x(5, 2, 3), state, weights, True, 1, 0.0, True, False, False


def cell(gates: int, *, is_lstm: bool = False) -> tuple:
    state = [x(2, 4), x(2, 4)] if is_lstm else x(2, 4)
    return x(2, 3), state, x(gates * 4, 3), x(gates * 4, 4), x(gates * 4), x(gates * 4)


def norm(*, training: bool) -> tuple:
    return x(4, 8, 3, 3), x(8), x(8), torch.zeros(8), torch.ones(8), training, 0.1, 1e-5


def legit_norm() -> list[tuple]:
    return [norm(training=True), norm(training=False)]


def whole_norm(*tail: object) -> list[tuple]:
    both = [(*norm(training=training), *tail) for training in (True, False)]
    return [*both, (x(4, 8, 3, 3), None, None, None, None, True, 0.1, 1e-5, *tail)]


def convolution(*tail: object) -> list[tuple]:
    return [(x(2, 3, 8, 8), x(4, 3, 3, 3), x(4), [1, 1], [1, 1], [1, 1], False, [0, 0], 1, *tail)]


def upsample(sides: int, *flags: object) -> list[tuple]:
    return [(x(2, 3, *[4] * sides), [7] * sides, *flags)]


def experts() -> tuple:
    import transformers.integrations.moe  # noqa: F401  (registers the operator)

    return x(6, 8), x(2, 8, 16), torch.tensor([2, 6], dtype=torch.int32)


HANDWRITTEN: dict[str, Callable[[], list[tuple]]] = {
    "grouped_mm_fallback": lambda: [experts()],
    "bernoulli": lambda: [(fixed(8, 1), 0.7), (fixed(5000), 0.3)],
    "bernoulli_": lambda: [(fixed(8, 1), 0.7), (fixed(5000), 0.3)],
    "normal_": lambda: [(fixed(5000),)],
    "chain_matmul": lambda: [([x(2, 3), x(3, 4), x(4, 5)],)],
    "einsum": lambda: [("ij,jk->ik", [x(2, 3), x(3, 4)])],
    "tensordot": lambda: [(x(2, 3), x(3, 4), [1], [0])],
    "convolution": convolution,
    "_convolution": lambda: convolution(False, False, True, True),
    "_convolution_mode": lambda: [(x(2, 3, 8, 8), x(4, 3, 3, 3), x(4), [1, 1], "same", [1, 1], 1)],
    "conv_tbc": lambda: [(x(5, 2, 3), x(3, 3, 4), x(4))],
    "_softmax": lambda: [(x(2, 3), 1, False)],
    "_safe_softmax": lambda: [(x(2, 3), 1)],
    "batch_norm": lambda: whole_norm(False),
    "instance_norm": lambda: whole_norm(False),
    "native_batch_norm": legit_norm,
    "_native_batch_norm_legit": legit_norm,
    "_native_batch_norm_legit_functional": legit_norm,
    "_batch_norm_impl_index": lambda: whole_norm(False),
    "native_layer_norm": lambda: [(x(3, 4), [4], x(4), x(4), 1e-5), (x(3, 4), [4], None, None, 1e-5)],
    "native_group_norm": lambda: [
        (x(2, 4, 3), x(4), x(4), 2, 4, 3, 2, 1e-5),
        (x(2, 4, 3), None, None, 2, 4, 3, 2, 1e-5),
    ],
    "where": lambda: [(x(3, 4) > 0.5, x(3, 4), x(3, 4)), (x(3, 4) > 0.5, x(3, 4), 1.0)],
    "floor_divide": lambda: [(fixed(3), fixed(3))],
    "heaviside": lambda: [(fixed(3), fixed(3))],
    "nonzero": lambda: [(x(3),)],
    "nonzero_numpy": lambda: [(x(3),)],
    "_prelu_kernel": lambda: [(x(2, 3) - 0.6, x(1, 3))],
    "log_sigmoid_forward": lambda: [(x(3),)],
    "rrelu_with_noise": lambda: [(x(3), fixed(3), 0.1, 0.3, True)],
    "dropout": lambda: [(x(3, 4), 0.5, True), (x(3, 4), 0.5, False)],
    "feature_dropout": lambda: [(x(3, 4, 2), 0.5, True)],
    "alpha_dropout": lambda: [(x(3, 4), 0.5, True)],
    "feature_alpha_dropout": lambda: [(x(3, 4, 2), 0.5, True)],
    "native_dropout": lambda: [(x(3, 4), 0.5, True)],
    "_adaptive_avg_pool2d": lambda: [(x(2, 3, 8, 8), [2, 2])],
    "max_pool1d": lambda: [(x(2, 3, 8), [2])],
    "max_pool1d_with_indices": lambda: [(x(2, 3, 8), [2])],
    "max_pool2d": lambda: [(x(2, 3, 8, 8), [2, 2])],
    "max_pool2d_with_indices": lambda: [(x(2, 3, 8, 8), [2, 2])],
    "adaptive_max_pool1d": lambda: [(x(2, 3, 8), [2])],
    "adaptive_max_pool2d": lambda: [(x(2, 3, 8, 8), [2, 2])],
    "upsample_nearest1d": lambda: upsample(1),
    "upsample_nearest2d": lambda: upsample(2),
    "upsample_nearest3d": lambda: upsample(3),
    "_upsample_nearest_exact1d": lambda: upsample(1),
    "_upsample_nearest_exact2d": lambda: upsample(2),
    "_upsample_nearest_exact3d": lambda: upsample(3),
    "upsample_linear1d": lambda: upsample(1, False),
    "upsample_bilinear2d": lambda: upsample(2, False),
    "upsample_trilinear3d": lambda: upsample(3, False),
    "upsample_bicubic2d": lambda: upsample(2, False),
    "_upsample_bicubic2d_aa": lambda: upsample(2, False),
    "_upsample_bilinear2d_aa": lambda: upsample(2, False),
    "index": lambda: [(x(4, 3), [index(0, 2, 2)])],
    "_unsafe_index": lambda: [(x(4, 3), [index(0, 2, 2)])],
    "col2im": lambda: [(x(2, 12, 9), [4, 4], [2, 2], [1, 1], [0, 0], [1, 1])],
    "_pad_circular": lambda: [(x(2, 3, 4), [1, 1])],
    "_pad_enum": lambda: [(x(2, 3, 4), [1, 1], 1)],
    "_reshape_alias": lambda: [(x(2, 3), [6], [1])],
    "_unsafe_view": lambda: [(x(2, 3), [6])],
    "numpy_T": lambda: [(x(2, 3),)],
    "matrix_H": lambda: [(x(2, 3),)],
    "unsafe_split_with_sizes": lambda: [(x(5, 2), [2, 3])],
    "broadcast_tensors": lambda: [([x(2, 1), x(3)],)],
    "cartesian_prod": lambda: [([x(2), x(3)],)],
    "block_diag": lambda: [([x(2, 2), x(3, 3)],)],
    "roll": lambda: [(x(4), [1])],
    "native_channel_shuffle": lambda: [(fixed(2, 4, 3, 3), 2)],
    "detach": lambda: [(x(3),)],
    "alias": lambda: [(x(3),)],
    "lift_fresh": lambda: [(x(3),)],
    "lift_fresh_copy": lambda: [(x(3),)],
    "zero": lambda: [(x(3),)],
    "copy": lambda: [(fixed(3), fixed(3))],
    "_to_copy": lambda: [(x(3),)],
    "to": lambda: [(x(3),)],
    "gru": lambda: [rnn(3), rnn(3, batch_sizes=True)],
    "gru.input": lambda: [rnn(3)],
    "rnn_tanh": lambda: [rnn(1), rnn(1, batch_sizes=True)],
    "rnn_relu": lambda: [rnn(1), rnn(1, batch_sizes=True)],
    "lstm": lambda: [rnn(4, is_lstm=True), rnn(4, is_lstm=True, batch_sizes=True)],
    "gru_cell": lambda: [cell(3)],
    "lstm_cell": lambda: [cell(4, is_lstm=True)],
    "rnn_tanh_cell": lambda: [cell(1)],
    "rnn_relu_cell": lambda: [cell(1)],
    "mkldnn_rnn_layer": lambda: [
        (
            x(5, 2, 3),
            x(16, 3),
            x(16, 4),
            x(16),
            x(16),
            x(1, 2, 4),
            x(1, 2, 4),
            False,
            [],
            2,
            4,
            1,
            True,
            False,
            True,
            True,
        )
    ],
    "sym_numel": lambda: [(x(3),)],
    "size": lambda: [(x(3),)],
    "numel": lambda: [(x(3),)],
    "dim": lambda: [(x(3),)],
    "is_floating_point": lambda: [(x(3),)],
    "is_complex": lambda: [(x(3),)],
    "sym_size": lambda: [(x(3), 0)],
    "is_same_size": lambda: [(x(3), x(3))],
}
