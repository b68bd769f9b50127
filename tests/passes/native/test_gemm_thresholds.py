"""Which products our kernels are handed, in one table: by sizes, processor, threads and dtype."""

import sys

import pytest
import torch

from amp_graph.passes.backends.cpu.linear import lower_linears
from amp_graph.passes.backends.cpu.loss.fuse_cross_entropy import cross_entropy_in_parts_is_profitable
from amp_graph.passes.backends.cuda.pad_shapes import aligning_is_profitable
from amp_graph.passes.graph.call_arguments import attention_kernel_is_profitable
from amp_graph.passes.layout.channels_last import channels_last_is_profitable, channels_last_weights_are_profitable
from amp_graph.passes.native import gemm_thresholds as rules

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
# A CPU with dot products, and one with matrix units; threads of the C kernels are OpenMP's, where it is.
DOTS, UNITS = {"amx": False}, {"amx": True}
TWO, MANY = {"threads": 2}, {"threads": 16}
ALONE = {"openmp": False}  # threads of torch, and none of ours

# The rule, the machine, what it is asked, and its answer.
ROWS = [
    ("small_linear_is_profitable", DOTS, ("cpu", BF16, 32, 256, 256), True),
    ("small_linear_is_profitable", DOTS, ("cuda", BF16, 32, 256, 256), False),
    ("small_linear_is_profitable", DOTS, ("cpu", FP16, 32, 256, 256), False),
    ("small_linear_is_profitable", DOTS, ("cpu", BF16, 32, 512, 512), False),
    ("small_linear_is_profitable", DOTS, ("cpu", BF16, 2048, 512, 13), False),
    ("small_linear_is_profitable", DOTS, ("cpu", BF16, 1024, 256, 256), False),
    ("small_linear_is_profitable", DOTS | TWO, ("cpu", BF16, 32, 256, 256), True),
    ("small_linear_is_profitable", UNITS | TWO, ("cpu", BF16, 32, 256, 256), True),
    ("small_linear_is_profitable", UNITS | TWO, ("cpu", BF16, 32, 512, 256), False),  # oneDNN's threads win sooner
    ("small_linear_is_profitable", UNITS, ("cpu", BF16, 64, 512, 512), True),
    ("small_linear_is_profitable", UNITS, ("cpu", BF16, 2048, 512, 256), False),
    ("small_linear_is_profitable", UNITS, ("cpu", BF16, 32, 1024, 1024), False),
    ("panels_are_profitable", DOTS, ("cpu", BF16, 32, 256, 256), True),
    ("panels_are_profitable", DOTS, ("cuda", BF16, 32, 256, 256), False),
    ("panels_are_profitable", DOTS, ("cpu", FP16, 32, 256, 256), False),
    ("panels_are_profitable", DOTS, ("cpu", BF16, 1024, 768, 768), False),
    (
        "panels_are_profitable",
        DOTS,
        ("cpu", BF16, 16, 3072, 768),
        True,
    ),  # few rows are read from memory
    ("panels_are_profitable", DOTS, ("cpu", BF16, 17, 3072, 768), False),
    ("panels_are_profitable", DOTS, ("cpu", BF16, 0, 256, 256), False),
    (
        "panels_are_profitable",
        UNITS,
        ("cpu", BF16, 32, 3072, 768),
        True,
    ),  # more rows while a weight is read
    ("panels_are_profitable", UNITS, ("cpu", BF16, 33, 3072, 768), False),
    ("panels_are_profitable", DOTS | MANY, ("cpu", BF16, 32, 256, 256), True),
    ("panels_are_profitable", DOTS | MANY, ("cpu", BF16, 16, 3072, 768), True),
    (
        "panels_are_profitable",
        DOTS | MANY,
        ("cpu", BF16, 16, 768, 3072),
        False,
    ),  # threads without a panel would wait
    ("amx_product_is_profitable", UNITS, ("cpu", BF16, 1024, 768, 768), True),
    ("amx_product_is_profitable", UNITS, ("cpu", BF16, 32, 64, 64), True),
    ("amx_product_is_profitable", UNITS, ("cpu", BF16, 8, 32, 32), False),
    ("amx_product_is_profitable", UNITS, ("cpu", BF16, 8192, 1, 256), False),  # a tile has 32 rows
    ("amx_product_is_profitable", UNITS, ("cpu", FP32, 1024, 768, 768), False),
    ("amx_product_is_profitable", UNITS, ("cpu", FP16, 1024, 768, 768), False),
    ("amx_product_is_profitable", UNITS, ("cuda", BF16, 1024, 768, 768), False),
    ("amx_product_is_profitable", DOTS, ("cpu", BF16, 1024, 768, 768), False),
    ("lstm_kernel_is_profitable", DOTS, ("cpu", BF16, 128, 512), True),
    ("lstm_kernel_is_profitable", DOTS | TWO, ("cpu", BF16, 128, 512), True),
    ("lstm_kernel_is_profitable", DOTS | MANY, ("cpu", BF16, 128, 512), True),
    ("lstm_kernel_is_profitable", DOTS | MANY, ("cpu", FP16, 32, 512), False),
    ("lstm_kernel_is_profitable", DOTS | MANY, ("cuda", BF16, 32, 512), False),
    ("lstm_kernel_is_profitable", UNITS | MANY, ("cpu", BF16, 32, 512), True),
    ("one_of_two_threads_idles", UNITS | TWO, ("cpu", BF16, 1024, 768, 3072), True),
    ("one_of_two_threads_idles", UNITS | TWO, ("cpu", BF16, 512, 384, 768), True),
    (
        "one_of_two_threads_idles",
        UNITS | TWO,
        ("cpu", BF16, 512, 768, 3072),
        False,
    ),  # more columns are spread
    ("one_of_two_threads_idles", UNITS | TWO, ("cpu", BF16, 1536, 768, 3072), False),  # several blocks are
    ("one_of_two_threads_idles", UNITS | TWO, ("cpu", BF16, 256, 256, 3072), False),
    ("one_of_two_threads_idles", UNITS | TWO, ("cpu", FP16, 1024, 768, 3072), False),
    ("one_of_two_threads_idles", UNITS | TWO, ("cuda", BF16, 1024, 768, 3072), False),
    (
        "one_of_two_threads_idles",
        UNITS | TWO | ALONE,
        ("cpu", BF16, 1024, 768, 3072),
        False,
    ),  # nor has ours two
    ("one_of_two_threads_idles", UNITS, ("cpu", BF16, 1024, 768, 3072), False),  # none to idle
    ("one_of_two_threads_idles", UNITS | {"threads": 4}, ("cpu", BF16, 1024, 768, 3072), False),  # not timed
]


@pytest.mark.parametrize(("name", "machine", "asked", "answer"), ROWS, ids=str)
def test_which_products_are_handed_to_our_kernels(name, machine, asked, answer, monkeypatch):
    monkeypatch.setattr(rules, "cpu_has_amx", lambda: machine["amx"])
    monkeypatch.setattr(rules, "has_openmp", lambda: machine.get("openmp", True))
    monkeypatch.setattr(torch, "get_num_threads", lambda: machine.get("threads", 1))
    for each in ("cpu_has_bf16", "multiplies_bf16"):
        monkeypatch.setattr(rules, each, lambda: True)
    assert getattr(rules, name)(*asked) is answer


def test_the_pass_asks_these():
    assert lower_linears.small_linear_is_profitable is rules.small_linear_is_profitable


# Rules of other rewrites, likewise.
OTHERS = [
    *((attention_kernel_is_profitable, machine, ("cpu", BF16, 2), True) for machine in (DOTS, UNITS)),
    (attention_kernel_is_profitable, DOTS, ("cpu", BF16, 1), True),
    (attention_kernel_is_profitable, UNITS, ("cpu", BF16, 1), False),  # torch's kernel is faster for one query
    (channels_last_is_profitable, DOTS, ("cpu", BF16, 2), True),
    (channels_last_is_profitable, DOTS, ("cpu", FP16, 2), False),
    *((channels_last_is_profitable, DOTS, ("cuda", low, 2), True) for low in (BF16, FP16)),
    *((channels_last_is_profitable, DOTS, ("cuda", low, 1), False) for low in (BF16, FP16)),
    (channels_last_is_profitable, DOTS, ("cuda", FP32, 9), False),
    (channels_last_weights_are_profitable, DOTS, ("cpu",), False),
    (channels_last_weights_are_profitable, DOTS, ("cuda",), True),
    (aligning_is_profitable, DOTS, ("cuda", BF16, 1 << 40), True),
    (aligning_is_profitable, DOTS, ("cpu", BF16, 1 << 40), False),
    (aligning_is_profitable, DOTS, ("cuda", FP32, 1 << 40), False),
    (cross_entropy_in_parts_is_profitable, DOTS, ("cpu", BF16, 1 << 14, 1 << 14), True),
    (cross_entropy_in_parts_is_profitable, DOTS, ("cuda", BF16, 1 << 14, 1 << 14), False),
    (cross_entropy_in_parts_is_profitable, DOTS, ("cpu", FP16, 1 << 14, 1 << 14), False),
]


@pytest.mark.parametrize(("rule", "machine", "asked", "answer"), OTHERS)
def test_which_rewrites_are_worth_it(rule, machine, asked, answer, monkeypatch):
    at = sys.modules[rule.__module__]
    for name, has in {"cpu_has_amx": machine["amx"], "cpu_has_bf16": True, "multiplies_bf16": True}.items():
        monkeypatch.setattr(at, name, lambda has=has: has, raising=False)
    assert rule(*asked) is answer
