"""Which images lie channels last: the stride of a dimension of size 1 has no meaning."""

import torch

from amp_graph.passes.layout.memory_format import is_channels_last

LAST = torch.channels_last


def test_the_strides_of_dimensions_of_size_one_do_not_count():
    assert is_channels_last(torch.empty(2, 3, 4, 5).to(memory_format=LAST))
    assert not is_channels_last(torch.empty(2, 3, 4, 5))
    assert is_channels_last(torch.empty_strided((2, 3, 1, 5), (15, 1, 999, 3)))
    assert is_channels_last(torch.empty_strided((1, 3, 4, 5), (7, 1, 15, 3)))
    assert not is_channels_last(torch.empty_strided((2, 3, 1, 5), (15, 5, 999, 1)))
    assert not is_channels_last(torch.empty_strided((2, 3, 4, 5), (120, 2, 30, 6)))  # with gaps
