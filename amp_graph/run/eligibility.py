"""Says which models are left as they are, and why.

``why_left(model, policy)`` is "" or "run by DeepSpeed, which ...".
"""

from __future__ import annotations

from typing import Any

import torch

from amp_graph.passes.torch_compat.dispatch import is_wrapper
from amp_graph.passes.torch_compat.modules import is_compiled, is_fsdp, is_sharded
from amp_graph.policy import Policy

WRAPPERS = (torch.nn.parallel.DistributedDataParallel, torch.nn.DataParallel)
OWN_AUTOCAST = "called under the script's own torch.autocast; --replace-autocast takes its place"
INNER_AUTOCAST = "uses torch.autocast in its own forward"
NEVER_TRAINED = "no backward reached its parameters"
FROZEN = "frozen: none of its parameters requires gradients"
NO_GRADIENTS = "only called without gradients"
CHECKPOINTED = "called by torch.utils.checkpoint, whose recomputation must repeat the forward as it was"
NO_STEP = (
    "in fp16 a step with infinite gradients must be skipped, and no optimizer.step() without a closure was seen that "
    "updates all its trained parameters"
)
CLOSURE = "in fp16 a step with infinite gradients must be skipped, and optimizer.step(closure) computes them itself"
HOOKS = "in fp16 gradients are scaled within a backward, and a hook of the script would see them"
FUNCTION = "in fp16 gradients are scaled within a backward, which may not be right for a custom autograd function"
AUTOGRAD_GRAD = "torch.autograd.grad, whose gradients are not those that an optimizer would skip"
OWN_SCALER = "the script has a GradScaler of its own; --replace-autocast leaves the scale to it, under fp16 autocast"
STRICT = "in fp16 a gradient may overflow, which clip_grad_norm_(error_if_nonfinite=True) would raise"
OVERFLOWS = "it overflows in fp16: its loss was infinite, or its gradients were at a scale of 1"
COMM_HOOK = "in fp16 a gradient may overflow, and the communication hook of DistributedDataParallel may keep it"
STATELESS = ("allreduce_hook", "fp16_compress_hook", "bf16_compress_hook")  # communication hooks


def inner_of(module: Any) -> Any:
    """Return the model in a wrapper for several processes or devices; else ``module``."""
    return module.module if isinstance(module, WRAPPERS) else module


def kind_of(module: torch.nn.Module) -> str:
    """Return how the report calls ``module``: its class, and what wraps it."""
    inner = inner_of(module)
    name = type(module).__name__
    return name if inner is module else f"{type(inner).__name__} in {name}"


def why_left(module: torch.nn.Module, policy: Policy) -> str:
    """Return why ``module`` is left as it is; "" if it can be converted as far as is known."""
    parts = list(module.modules())
    units = [part for part in parts if is_sharded(part)]
    if any(is_fsdp(part) for part in parts if part not in units):
        return "wrapped by FullyShardedDataParallel, whose flat parameters have one dtype"
    if units and needs_scale(policy):
        return "sharded by fully_shard, and in fp16 losses are scaled: amp_graph.convert and amp_graph.GradScaler"
    if any(type(part).__module__.partition(".")[0] == "deepspeed" for part in parts):
        return "run by DeepSpeed, which decides precision itself"
    if any(map(is_compiled, parts)):
        return (
            "compiled by the script; torch.compile(model, backend='amp_graph') rewrites it, or --compile inductor with "
            "the script's compilation switched off"
        )
    if not units and any(is_wrapper(parameter) for parameter in module.parameters()):
        return "its parameters are distributed or wrapped tensors"
    if module is not inner_of(module) and "forward" in inner_of(module).__dict__:
        return "its forward was replaced by another library, below DistributedDataParallel"
    devices = {parameter.device.type for parameter in module.parameters()}
    if policy.dtype == "auto" and any(policy.torch_dtype(device) == torch.float16 for device in devices):
        return "its device computes in fp16 only, which needs a loss scale: amp_graph.convert and amp_graph.GradScaler"
    return ""


def needs_scale(policy: Policy) -> bool:
    """Return whether losses are scaled under ``policy``."""
    return policy.dtype == "fp16" and policy.level != "O0"


def script_scales() -> bool:
    """Return whether the present call is under fp16 autocast: scripts scale their loss for that."""
    on = (device for device in ("cpu", "cuda") if torch.is_autocast_enabled(device))
    return any(torch.get_autocast_dtype(device) == torch.float16 for device in on)


def why_not_scaled(module: torch.nn.Module) -> str:
    """Return what about ``module`` keeps its gradients from being scaled; "" if nothing does."""
    if any(getattr(hook, "__name__", "") not in STATELESS for hook, _ in getattr(module, "_comm_hooks", ())):
        return COMM_HOOK
    hooked = any(part._backward_hooks or part._backward_pre_hooks for part in module.modules())
    return HOOKS if hooked else ""
