"""What of a process anybody can see that may change it for all code in it: settings, hooks, and replaced functions.

Run as a script it prints, as JSON, what each stage of a use of amp_graph changes; and what is changed by hand at the
end, and seen of that.
"""

import collections
import copy
import gc
import json
import os
import sys
import threading
import types
import warnings

import torch
import torch._dynamo
import torch._functorch.config
import torch._inductor.config
import torch.optim.optimizer as optimizers
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

from tests.by_hand import descend
from tests.warned import without_warnings

FLAGS = (
    "cuda.matmul.allow_tf32", "cuda.matmul.allow_fp16_reduced_precision_reduction",
    "cuda.matmul.allow_bf16_reduced_precision_reduction", "cudnn.enabled", "cudnn.benchmark", "cudnn.deterministic",
    "cudnn.allow_tf32", "mkldnn.enabled", "opt_einsum.enabled",
)  # fmt: skip


def owners():
    """Yield every module of torch, and every class in one, by name."""
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "torch" and isinstance(module, types.ModuleType):
            yield name, module
            for key, value in list(vars(module).items()):
                if issubclass(type(value), type) and value.__module__ == name:
                    yield f"{name}.{key}", value


def attributes():
    """Return every attribute of one, by name: data by value, containers by their elements, all else by identity."""
    return {
        f"{name}.{key}": _shown(value)
        for name, owner in owners()
        for key, value in list(vars(owner).items())
        if key not in ("__warningregistry__", "__builtins__", "__slotnames__")  # Python's own
    }


def _shown(value):
    if type(value) in (bool, int, float, complex, str, bytes, type(None)):
        return repr(value)
    if issubclass(type(value), dict):
        return id(value), [(id(key), id(one)) for key, one in list(value.items())]
    if issubclass(type(value), (list, tuple, set, frozenset, collections.deque)):
        return id(value), sorted(map(id, list(value)))
    return id(value)


def snapshot():
    """Return all of it, by name."""
    found = {}
    with without_warnings(Warning):
        for module in (torch._dynamo.config, torch._inductor.config, torch._functorch.config):
            found |= {f"{module.__name__}.{k}": repr(getattr(module, k, None)) for k in module._config}
    for flag in FLAGS:
        value = torch.backends
        for part in flag.split("."):
            value = getattr(value, part)
        found[f"torch.backends.{flag}"] = repr(value)
    found |= attributes()
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
    known = {name.rpartition(".")[0] for name in before}
    # Of modules that were imported meanwhile, and of their classes.
    new = {name for name in {*after} - {*before} if name.rpartition(".")[0] not in known}
    return sorted(name for name in {*before, *after} - new if before.get(name) != after.get(name))


def net():
    return nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 64))


def steps(model, x, optimizer):
    for _ in range(3):
        descend(optimizer, model(x).square().mean())
    model.eval()
    with torch.no_grad():
        model(x)
        if hasattr(model, "_amp_graph"):
            with sys.modules["amp_graph"].frozen(model):
                model(x)
    model.train()


def as_torch_does(x):
    """Do with torch alone what the stages do: what that writes is torch's own."""
    plain = torch.compile(net(), backend="eager")
    for kind in (torch.optim.SGD, torch.optim.AdamW):
        steps(plain, x, kind(plain.parameters(), 0.01))
    scaler, half = torch.amp.GradScaler("cpu"), net().bfloat16()
    optimizer = torch.optim.SGD(half.parameters(), 0.01)
    optimizer.register_step_post_hook(lambda *given: None)
    scaler.scale(half(x.bfloat16()).square().mean()).backward()
    scaler.step(optimizer)
    scaler.update()
    make_fx(lambda x: torch.autograd.grad(x.square().sum(), x), tracing_mode="fake")(x.clone().requires_grad_())
    copy.deepcopy(plain)
    plain(x[:3])  # another graph
    torch.compile(breaks, backend="eager")(x)
    library = torch.library.Library("snapshot_of_process", "DEF")
    library.define("same(Tensor x) -> Tensor")
    library.impl("same", torch.clone, "CompositeExplicitAutograd")
    torch.ops.snapshot_of_process.same(x)
    gc.collect()


def breaks(x):
    x = x + 1
    torch._dynamo.graph_break()
    return x + 1


def stages(x):
    """Yield the name of each stage once it is through."""
    import amp_graph

    for name in amp_graph.__all__:
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
    torch._dynamo.utils.run_node = lambda *given: None
    yield "torch._dynamo.utils.run_node"
    nn.Module.half = lambda self: self
    yield "torch.nn.modules.module.Module.half"
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
    warnings.filterwarnings("ignore", "Guards may run slower on Python 3.13.0")  # as in all tests: pyproject.toml
    x = torch.randn(32, 64)
    cold = snapshot()
    as_torch_does(x)
    start = before = snapshot()
    own = {*changed(cold, start)}
    told = {}
    for name in stages(x):
        for thread in [t for t in threading.enumerate() if t.name.startswith("amp_graph")]:
            thread.join()  # it compiles ahead of use, and ends
        after = snapshot()
        told[name], before = [n for n in changed(before, after) if n not in own], after
    told["in all"] = [n for n in changed(start, before) if n not in own]
    names = list(by_hand())
    seen = changed(before, snapshot())
    print(json.dumps({"stages": told, "by hand": names, "seen": seen, "torch": sorted(own)}))


if __name__ == "__main__":
    main()
