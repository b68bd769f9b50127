"""Operators of torch without a public name: what captured graphs hold, and what works on many tensors at once.

Checked on torch 2.11 - 2.13. The ``foreach_`` ones are in PyTorch's documentation, by names with an underscore.
"""

from __future__ import annotations

from typing import Any

import torch

TO_COPY = torch.ops.aten._to_copy.default
ASSERT_TENSOR_METADATA = torch.ops.aten._assert_tensor_metadata.default
ENCODER_LAYER = torch.ops.aten._transformer_encoder_layer_fwd.default
UNSAFE_VIEW = torch.ops.aten._unsafe_view.default
scaled_dot_product_attention_math = torch.ops.aten._scaled_dot_product_attention_math
collectives: Any = torch.ops._c10d_functional

foreach_add_ = torch._foreach_add_
foreach_copy_ = torch._foreach_copy_
foreach_mul_ = torch._foreach_mul_
foreach_norm = torch._foreach_norm
fused_adagrad_ = torch._fused_adagrad_
fused_adam_ = torch._fused_adam_
fused_adamw_ = torch._fused_adamw_
fused_sgd_ = torch._fused_sgd_
unscale_and_check_finite_ = torch._amp_foreach_non_finite_check_and_unscale_
update_scale_ = torch._amp_update_scale_
