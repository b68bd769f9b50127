"""What holds for the check of every Triton kernel before its first use."""

import pytest
import torch

from amp_graph.passes.backends.cuda.kernels import add_norm, cross_entropy, embedding_gradient, optimizer_update
from amp_graph.passes.native import triton_loader
from tests.passes.backends.cuda.kernels.where import mark_where_they_run

pytestmark = mark_where_they_run()


@pytest.mark.parametrize("kernels", [add_norm, cross_entropy, embedding_gradient, optimizer_update])
def test_the_check_does_not_depend_on_what_is_set_around_it(kernels, monkeypatch):
    monkeypatch.setattr(triton_loader, "_checked", set())
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with torch.inference_mode():
            assert kernels.kernels(torch.bfloat16) is kernels.KERNELS
    finally:
        torch.set_default_dtype(before)
