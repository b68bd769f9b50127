"""What of a process anybody can see that may change it for all code in it: settings, hooks, and replaced functions.

Run as a script it prints, as JSON, what each stage of a use of amp_graph changes; and what the last stage, in which
such things are changed by hand, shows of that.
"""

import gc
import json
import os
import sys
import threading
import warnings

import torch
import torch._dynamo
import torch._functorch.config
import torch._inductor.config
import torch.optim.optimizer as optimizers
from torch import nn

FLAGS = (
    "cuda.matmul.allow_tf32", "cuda.matmul.allow_fp16_reduced_precision_reduction",
    "cuda.matmul.allow_bf16_reduced_precision_reduction", "cudnn.enabled", "cudnn.benchmark", "cudnn.deterministic",
    "cudnn.allow_tf32", "mkldnn.enabled", "opt_einsum.enabled",
)  # fmt: skip
OWNERS = {
    "torch": torch, "torch.Tensor": torch.Tensor, "torch.UntypedStorage": torch.UntypedStorage, "torch._C": torch._C,
    "torch.cuda.CUDAGraph": torch.cuda.CUDAGraph,
    "torch._C._nn": torch._C._nn, "torch.utils.dlpack": torch.utils.dlpack, "torch.nn.functional": nn.functional,
    "torch.nn.Module": nn.Module, "torch.optim.Optimizer": torch.optim.Optimizer, "torch.optim.SGD": torch.optim.SGD,
    "torch.optim.AdamW": torch.optim.AdamW, "torch.autograd.Function": torch.autograd.Function,
}  # fmt: skip


def snapshot():
    """Return all of it, by name."""
    found = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated settings
        for module in (torch._dynamo.config, torch._inductor.config, torch._functorch.config):
            found |= {f"{module.__name__}.{k}": repr(getattr(module, k, None)) for k in module._config}
    for flag in FLAGS:
        value = torch.backends
        for part in flag.split("."):
            value = getattr(value, part)
        found[f"torch.backends.{flag}"] = repr(value)
    for name, owner in OWNERS.items():
        found |= {f"{name}.{k}": id(v) for k, v in vars(owner).items()}
    for module in (optimizers, nn.modules.module):
        tables = {k: v for k, v in vars(module).items() if k.startswith("_global_") and isinstance(v, dict)}
        found |= {f"{module.__name__}.{k}": len(v) for k, v in tables.items()}
    found |= {f"torch.ops.{name}": True for name in vars(torch.ops)}
    found |= {f"os.environ[{name}]": value for name, value in os.environ.items()}
    return found | {
        "gc": repr((gc.isenabled(), gc.get_threshold(), gc.get_freeze_count(), len(gc.callbacks))),
        "warnings.filters": repr(warnings.filters),
        "sys": repr((sys.meta_path, sys.path_hooks, sys.getrecursionlimit(), sys.gettrace(), sys.getprofile())),
        "sys.excepthook": id(sys.excepthook),
        "threads": repr((torch.get_num_threads(), torch.get_num_interop_threads())),
        "threading": sorted(thread.name for thread in threading.enumerate()),
        "defaults": repr((torch.get_default_dtype(), torch.get_default_device(), torch.get_float32_matmul_precision())),
        "autocast": repr([(torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in ("cpu", "cuda")]),
        "autocast cache": torch.is_autocast_cache_enabled(),
        "grad": repr((torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_anomaly_enabled())),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "folder": os.getcwd(),
        "backends": sorted(torch._dynamo.list_backends(exclude_tags=None)),
    }


def changed(before, after):
    """Return the names of what is not the same."""
    return sorted(name for name in {*before, *after} if before.get(name) != after.get(name))


def net():
    return nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 64))


def steps(model, x, optimizer):
    for _ in range(3):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        model(x)
    model.train()


def stages(x):
    """Yield the name of each stage once it is through."""
    import amp_graph

    for name in (*amp_graph.__all__, "memory"):
        getattr(amp_graph, name)
    yield "import"
    model, held_low = net(), net()
    amp_graph.convert(model, "bf16")
    yield "convert"
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    steps(model, x, optimizer)
    amp_graph.report(model).text()
    yield "steps"
    other = net()
    whole = amp_graph.TrainStep(other, lambda out: out.square().mean(), torch.optim.AdamW(other.parameters()), "fp16")
    for _ in range(3):
        whole(x)
    scaler, scaled = amp_graph.GradScaler(), torch.optim.SGD(model.parameters(), 0.01)
    scaler.scale(model(x).square().mean()).backward()
    scaler.step(scaled)
    scaler.update()
    yield "TrainStep and GradScaler"
    amp_graph.convert(held_low, "bf16-O2")
    steps(held_low, x.bfloat16(), torch.optim.SGD(held_low.parameters(), 0.01))
    yield "O2"
    amp_graph.revert(model)
    amp_graph.revert(held_low)
    del whole, other, held_low
    gc.collect()
    yield "revert"


def by_hand():
    """Change what a snapshot is to see, and yield the name of each."""
    torch._dynamo.config.recompile_limit = 99
    yield "torch._dynamo.config.recompile_limit"
    torch.backends.cudnn.benchmark = not torch.backends.cudnn.benchmark
    yield "torch.backends.cudnn.benchmark"
    optimizers.register_optimizer_step_pre_hook(lambda *given: None)
    yield "torch.optim.optimizer._global_optimizer_pre_hooks"
    nn.Module.half = lambda self: self
    yield "torch.nn.Module.half"
    gc.disable()
    yield "gc"
    warnings.filterwarnings("ignore", "nobody says this")
    yield "warnings.filters"
    os.environ["SET_BY_HAND"] = "1"
    yield "os.environ[SET_BY_HAND]"
    torch.set_num_threads(torch.get_num_threads() + 1)
    yield "threads"
    torch.set_autocast_dtype("cpu", torch.float16)
    yield "autocast"


def main():
    for other in ("amp_graph. torch .* is newer than", "Guards may run slower on Python 3.13.0"):
        warnings.filterwarnings("ignore", other)  # as in all tests: conftest.py and pyproject.toml
    x = torch.randn(32, 64)
    plain = torch.compile(net(), backend="eager")  # what Dynamo and torch.optim do at their first use is not ours
    for kind in (torch.optim.SGD, torch.optim.AdamW):
        steps(plain, x, kind(plain.parameters(), 0.01))
    start = before = snapshot()
    told = {}
    for name in stages(x):
        for thread in [t for t in threading.enumerate() if t.name.startswith("amp_graph")]:
            thread.join()  # it compiles ahead of use, and ends
        after = snapshot()
        told[name], before = changed(before, after), after
    told["in all"] = changed(start, before)
    seen = {}
    for name in by_hand():
        after = snapshot()
        seen[name], before = changed(before, after), after
    print(json.dumps({"stages": told, "by hand": seen}))


if __name__ == "__main__":
    main()
