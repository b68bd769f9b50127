"""Which modules of `amp_graph.passes` belong to backends: the core imports none of them."""

ATTENTION = ("attention", "attention_backward", "attention_kernel")
LINEAR = (
    "amx_product", "amx_products", "fuse_bias", "grouped_product", "linear_kernel", "linear_low",
    "linears_of_parameters", "own_products", "small_linears", "train_linears",
)  # fmt: skip
INFERENCE = (
    "fold_norms", "folded_norms", "look_at_values", "pack_weights", "packed_weights", "widen_products",
    "widened_products",
)  # fmt: skip
CONVOLUTION = (
    "conv1d", "conv_as_product", "conv_transpose", "convolution", "convolution_backward", "depthwise", "depthwise_ops",
    "pointwise_conv", "turn",
)  # fmt: skip
NORM = (
    "add_norm_again", "batch_norm", "batch_norm_again", "batch_norm_ops", "fuse_batch_norm", "fuse_group_norm",
    "fuse_norm", "group_norm", "norm_ops", "residual_norm",
)  # fmt: skip
POINTWISE = (
    "by_table", "by_table_again", "custom_activations", "dropout_in_bits", "fuse_dropout", "table_activations",
)  # fmt: skip
LOSS = ("cross_entropy_kernel", "cross_entropy_low", "linear_cross_entropy", "overwrite_logits")
RECURRENT = (
    "cudnn_recurrent", "gru_layer", "keep_recurrent", "lstm_backward", "lstm_kernel", "recurrent", "recurrent_layers",
)  # fmt: skip
CUDA = ("align_shapes", "aligned", "count_batches", "reduce_from_low")
INDUCTOR = ("inductor", "lay_gradients", "product_kernel", "small_products", "step_options")
BACKENDS = frozenset({
    *ATTENTION, *LINEAR, *INFERENCE, *CONVOLUTION, *NORM, *POINTWISE, *LOSS, *RECURRENT, *CUDA, *INDUCTOR,
})  # fmt: skip
# What puts the passes of all rooms together.
COMPOSITION = frozenset({"pipeline", "pipeline_table", "pipeline_skips"})
# The words of ``skip=`` for the passes of these modules.


def is_of_backend(target):
    """Whether a node's target is a function of a backend's module."""
    return str(getattr(target, "__module__", "")).rpartition(".")[2] in BACKENDS
