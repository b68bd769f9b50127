"""Which images lie channels last: the stride of a dimension of size 1 has no meaning."""

import torch

from amp_graph.passes.layout.memory_format import is_channels_last

LAST = torch.channels_last


CASES = [
    (torch.empty(2, 3, 4, 5).to(memory_format=LAST), True),
    (torch.empty(2, 3, 4, 5), False),
    (torch.empty_strided((2, 3, 1, 5), (15, 1, 999, 3)), True),
    (torch.empty_strided((1, 3, 4, 5), (7, 1, 15, 3)), True),
    (torch.empty_strided((2, 3, 1, 5), (15, 5, 999, 1)), False),
    (torch.empty_strided((2, 3, 4, 5), (120, 2, 30, 6)), False),  # with gaps
]


def test_the_strides_of_dimensions_of_size_one_do_not_count():
    assert [is_channels_last(image) for image, _ in CASES] == [wanted for _, wanted in CASES]
