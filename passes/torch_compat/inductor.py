"""Inductor: what it does by itself to matmuls and images, and its packages.

Each name states the versions of torch that it was checked on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch


def inductor_config() -> Any:
    """Return the module of Inductor's options, which is imported when it is first asked for, as all of Inductor is."""
    from torch._inductor import config

    return config


def mode_options() -> dict[str, dict[str, Any]]:
    """Return the options of each mode of ``torch.compile``; 2.11 - 2.13."""
    from torch._inductor import list_mode_options

    return list_mode_options()


def compile_graph(gm: torch.fx.GraphModule, example_inputs: Sequence[Any], options: Mapping[str, Any]) -> Any:
    """Return ``gm``, and later its backward, compiled by Inductor under ``options``; 2.11 - 2.13."""
    from torch._inductor.compile_fx import compile_fx

    return compile_fx(gm, list(example_inputs), config_patches=dict(options))


def graph_pass_hook(run: Callable[[torch.fx.Graph], None], files: Sequence[str], key: Sequence[Any]) -> Any:
    """Return ``run`` as a pass for Inductor, known in its cache by the sources ``files`` and ``key``; 2.11 - 2.13."""
    from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

    class Passes(CustomGraphPass):
        def __call__(self, graph: torch.fx.Graph) -> None:
            run(graph)

        def uuid(self) -> Any:
            return [get_hash_for_files(tuple(files)), *key, torch.get_num_threads()]

    return Passes()


def pads_matmuls(options: Mapping[str, Any]) -> bool:
    """Say whether Inductor pads matmuls on CUDA, under the user's ``options``."""
    return bool(options.get("shape_padding", inductor_config().shape_padding))
