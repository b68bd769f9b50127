"""Former names of passes and groups of passes, and names of deleted passes, which policies may still use.

Before: ``skip=old_name|deleted_name``. After: ``skip=new_name``, which is what the policy holds and prints.
"""

from __future__ import annotations

ALIASES: dict[str, str] = {
    "align_shapes": "pad_shapes",
    "amx_products": "lower_weight_gradients",
    "cast_parts": "sink_casts_into_concat",
    "contiguous_linear": "contiguous_linear_input",
    "conv_as_linear": "conv_to_linear",
    "cudnn_recurrent": "cudnn_rnn",
    "drop_dropout": "remove_no_op_dropout",
    "drop_empty": "remove_empty_concat_operands",
    "einsums_as_products": "einsum_to_matmul",
    "fold_masks": "fold_constant_masks",
    "fold_norms": "fold_batch_norms",
    "fuse_batch_norm": "fuse_batch_norm_relu",
    "global_pool": "global_avg_pool_gradient",
    "group_weight_casts": "batch_weight_casts",
    "keep_gradient_memory": "reuse_embedding_gradients",
    "keep_large_results": "reuse_output_buffers",
    "keep_recurrent": "lower_rnn",
    "linear_cross_entropy": "fuse_cross_entropy",
    "linears_of_parameters": "fuse_casts_into_linears",
    "lower_large_linears": "lower_linears",
    "lower_small_linears": "lower_linears",
    "look_at_values": "elide_nan_handling",
    "overwrite_logits": "logits_gradient_in_place",
    "pack_weights": "prepack_weights",
    "pointwise_conv": "lower_pointwise_conv",
    "products_as_linears": "matmul_to_linear",
    "protect_norms": "fp32_norm_gradients",
    "small_linears": "lower_linears",
    "train_linears": "lower_linears",
    "widen_large": "upcast_into_huge_pages",
    "widen_products": "chunk_upcast_linears",
}  # former name -> current name, both with underscores

# Passes that were deleted, with underscores: a policy may still skip them, and there is nothing to skip.
DELETED = frozenset({"accumulate_in_place"})
