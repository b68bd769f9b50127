"""Converts a model in place to mixed precision, and reverts it.

Before: ``model(x)`` in fp32. After: ``model(x)`` through the rewritten graph, the same object otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any, TypeVar

import torch

from amp_graph.capture.conversion import WRAPPERS, Conversion, conversion_of, whole_of
from amp_graph.capture.dynamo_backend import Compile, check_compile
from amp_graph.capture.frozen_conversion import FrozenConversion
from amp_graph.capture.recapture_limits import MOST, check_max_graphs
from amp_graph.capture.sensitivity_sample import Sample, measure
from amp_graph.compiler_options import options_text, read_options
from amp_graph.devices import device_of_model, machine_name
from amp_graph.errors import CaptureError, PolicyError, warn
from amp_graph.optim.master_weight_updates import let_optimizers_update_masters
from amp_graph.optim.master_weights import lower_parameters, restore_parameters
from amp_graph.optim.widened_parameters import narrow_parameters, trained_halves, widen_parameters
from amp_graph.passes.calibration.node_keys import few, module_of
from amp_graph.passes.precision.sensitivity import Measured
from amp_graph.passes.torch_compat.dynamo_entries import compiled_in_place
from amp_graph.passes.torch_compat.modules import uninitialized
from amp_graph.policy import Policy
from amp_graph.policy_words import HELD_LOW

Model = TypeVar("Model", bound=torch.nn.Module)


def convert(
    model: Model,
    policy: Policy | str | None = None,
    *,
    compile: Compile = "eager",
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
    dynamic: bool | None = None,
    strict: bool = False,
    sample: Sample | None = None,
    max_graphs: int = MOST,
) -> Model:
    """Convert ``model`` in place to automatic mixed precision and return it, the same object.

    The model is captured at its first call and again whenever its guards fail (other shapes, train or eval,
    gradient mode); ``isinstance``, ``state_dict``, hooks, ``deepcopy`` and pickling are as before. At levels O2 and
    O3 the same Parameter objects hold low precision, and ``state_dict`` stays fp32; ``step()`` of any torch optimizer
    over them, built before or after, updates their fp32 masters (O2).

    Repeated calls of one captured graph on the same input and weights return the same bits, from the first call on.
    Calls with and without gradients may differ in rounding, and so may a frozen model (``amp_graph.freeze``), which
    packs weights and folds batch norms.

    model: any ``torch.nn.Module``; inputs and outputs keep their shapes and dtypes (but for ``keep_outputs``).
    policy: a ``Policy`` or its text form; None for bf16, or fp16 on CUDA devices without bf16.
    compile: "eager" (the rewritten graph under PyTorch's autograd), "inductor", or any Dynamo backend.
    mode, options: as in torch.compile, for compile="inductor": convert(model, compile="inductor", mode="max-autotune").
    Both may be given; options take precedence.
    dynamic: as in torch.compile; None makes sizes symbolic once they are seen to change.
    strict: raise CaptureError instead of warning when a call ran without any captured graph.
    sample: for a policy whose accuracy is a number, a function that calls the model once and returns the loss, such as
    ``lambda model: loss_fn(model(x), y)``. It is called now, in fp32; its gradients measure how much each rounding
    changes the loss. Without it, and in graphs of other operations, rules estimate that. It changes no gradient,
    buffer or random state.
    max_graphs: the most graphs kept per code object, for calls that differ in sizes or in values that cannot be graph
    inputs. Calls without a graph run as code that escapes capture, with a warning that says what changes.

    Raises CaptureError (the model cannot be converted), PolicyError, ListError; the model is then unchanged.
    """
    if isinstance(model, WRAPPERS):
        _refuse_level_of_wrapped(model, Policy.parse(policy))
        compiler: dict[str, Any] = {"compile": compile, "mode": mode, "options": options, "dynamic": dynamic}
        convert(model.module, policy, strict=strict, sample=sample, max_graphs=max_graphs, **compiler)
        return model
    refuse_what_is_no_model("convert", model)
    wanted = Policy.parse(policy)
    check_compile("convert", compile)
    found = read_options("convert", compile, mode, options)
    check_max_graphs("convert", max_graphs)
    present = conversion_of(model)
    if present is not None:
        if (present.policy, present.compile, present.options) == (wanted, compile, found) and sample is None:
            return model
        raise CaptureError(
            f"convert: the model is already converted with policy='{present.policy}', "
            f"compile={present.compile!r}{options_text(present.options)}\n"
            "  fix:   amp_graph.revert(model) first"
        )
    _refuse_part_of_converted(model)
    refuse_what_cannot_be_converted(model, wanted)
    for device in sorted({p.device.type for p in model.parameters()} or {"cpu"}):
        wanted.op_list(device)  # a bad list raises here, not at the first step
    warn_of_unmatched(model, wanted)
    _warn_of_other_machine(model, wanted)
    measured = _measured(model, wanted, sample, dynamic)
    wrapped = model.__dict__.get("forward")
    made = Conversion(model, wanted, compile, dynamic, strict, wrapped, measured, max_graphs, found)
    # Nothing of the model has changed so far; what follows is undone if it raises.
    # O3 has no masters: its optimizers update low parameters by low states.
    with widen_parameters(model, states=wanted.level != "O3") if wanted.widen else nullcontext(None) as before:
        made.narrows_to = before or {}
        if wanted.level in HELD_LOW:
            let_optimizers_update_masters()
            with lower_parameters(model, wanted):
                made.attach()
        else:
            made.attach()
    return model


def _measured(
    model: torch.nn.Module, policy: Policy, sample: Sample | None, dynamic: bool | None
) -> tuple[Measured, ...]:
    """Return the rounding sensitivities that ``sample`` measures; refuse it without an error budget."""
    if sample is None or policy.level == "O0":
        return ()
    if policy.budget is None:
        raise PolicyError(
            f"convert: sample= is for an error budget, and accuracy={policy.accuracy} has none\n"
            "  legal: sample= with an error budget\n  fix:   amp_graph.convert(model, 'bf16,accuracy=1.5', sample=...)"
        )
    return tuple(measured for _, measured in measure(model, policy, sample, dynamic))


def revert(model: Model) -> Model:
    """Undo ``convert`` and return ``model``, the same object, which runs as it was written.

    Parameters have their former dtype again: at O2 the values of their masters. Raises CaptureError if ``model`` is
    not converted.
    """
    if isinstance(model, WRAPPERS):
        revert(model.module)
        return model
    found = converted("revert", model)
    if found.whole is not model:
        raise CaptureError(
            f"revert: this {type(model).__name__} was converted as a part of a {type(found.whole).__name__}\n"
            "  fix:   amp_graph.revert of the whole"
        )
    refuse_replaced("revert", found)
    if isinstance(found, FrozenConversion):
        found.thaw()
        found = found.thawed
    with restore_parameters(model):
        found.detach()
    narrow_parameters(model, found.narrows_to)
    return model


def converted(caller: str, model: torch.nn.Module) -> Conversion:
    """Return the conversion of ``model``; CaptureError if it has none."""
    found = conversion_of(model)
    if found is None:
        kind = type(model.module if isinstance(model, WRAPPERS) else model).__name__
        raise CaptureError(f"{caller}: the {kind} is not converted\n  fix:   amp_graph.convert(model) first")
    return found


def refuse_replaced(caller: str, found: Conversion) -> None:
    """Raise CaptureError if other code has put its own forward over that of the conversion."""
    present = found.model.__dict__.get("forward")
    if present is not found:
        raise CaptureError(
            f"{caller}: model.forward was replaced after amp_graph.convert, by "
            f"{getattr(present, '__qualname__', type(present))}, which may call the converted forward\n"
            f"  fix:   undo that replacement first, then amp_graph.{caller}(model)"
        )


def refuse_what_is_no_model(caller: str, model: Any) -> None:
    """Raise CaptureError for what is no model, or has no Python forward."""
    if isinstance(model, torch.jit.ScriptModule):
        raise CaptureError(
            f"{caller}: {type(model).__name__} is a scripted module, which has no Python forward to capture\n"
            f"  fix:   amp_graph.{caller} of the original model, before torch.jit.script(model)"
        )
    if isinstance(model, torch.nn.Module):
        return
    example = f"amp_graph.{caller} of an instance" if isinstance(model, type) else "a torch.nn.Module around it"
    what = f"the class {model.__name__}" if isinstance(model, type) else f"a {type(model).__name__}"
    raise CaptureError(
        f"{caller}: {what} is not a torch.nn.Module\n  legal: an instance of torch.nn.Module\n  fix:   {example}"
    )


def refuse_converted(caller: str, model: torch.nn.Module) -> None:
    """Raise CaptureError for a model that is converted, where it is taken as it was written."""
    if conversion_of(model) is not None:
        raise CaptureError(
            f"{caller}: the {type(model).__name__} is converted already, and is taken as it was written\n"
            f"  fix:   amp_graph.revert(model) first, and amp_graph.convert(model) again after {caller}"
        )


def refuse_meta(caller: str, model: torch.nn.Module) -> None:
    """Raise CaptureError for a model with tensors that hold no values."""
    meta = [name for name, t in (*model.named_parameters(), *model.named_buffers()) if t.is_meta]
    if meta:
        raise CaptureError(
            f"{caller}: {len(meta)} tensors are on the meta device and hold no values: {few(meta)}\n"
            f"  fix:   model.to_empty(device='cpu') and load its weights before amp_graph.{caller}(model)"
        )


def _refuse_level_of_wrapped(model: torch.nn.Module, policy: Policy) -> None:
    if policy.level in HELD_LOW:
        kind = type(model).__name__
        raise CaptureError(
            f"convert: {kind} has built its buckets for fp32 gradients; level {policy.level} lowers parameters\n"
            f"  fix:   {kind}(amp_graph.convert(model, '{policy}'))"
        )


def _refuse_part_of_converted(model: torch.nn.Module) -> None:
    """Raise CaptureError if ``model`` is a submodule of a converted model: it would break that model's graphs."""
    if found := whole_of(model):
        whole, path = found
        kind, outer = type(model).__name__, type(whole).__name__
        raise CaptureError(
            f"convert: this {kind} is submodule {path!r} of a converted {outer}, whose graphs contain it already\n"
            f"  fix:   do not convert it: converting the {outer} converts its submodules. To convert submodules only, "
            f"amp_graph.revert the {outer} first"
        )


def refuse_what_cannot_be_converted(model: torch.nn.Module, policy: Policy) -> None:
    """Raise CaptureError if ``model`` cannot run under ``policy``."""
    if compiled_in_place(model):
        raise CaptureError(
            "convert: the model was compiled in place by model.compile()\n"
            "  fix:   amp_graph.convert(model, compile='inductor') on the uncompiled model"
        )
    inside = [name for name, part in model.named_modules() if part is not model and conversion_of(part) is not None]
    if inside:
        raise CaptureError(
            f"convert: {len(inside)} of its submodules are already converted: {few(inside)}\n"
            f"  fix:   amp_graph.revert(model.get_submodule({inside[0]!r})); that converts its submodules, too"
        )
    refuse_meta("convert", model)
    lazy = uninitialized(model.named_parameters()) if policy.level in HELD_LOW else []
    if lazy:
        raise CaptureError(
            f"convert: level {policy.level} changes parameters, and {len(lazy)} are not initialized: {few(lazy)}\n"
            "  fix:   call the model once on a batch before amp_graph.convert(model), to initialize them; level "
            "O1 accepts them"
        )
    half = [*trained_halves(model)]
    if half and policy.level == "O1" and not policy.widen:
        raise CaptureError(
            f"convert: level O1 trains parameters in fp32, and {len(half)} are in half precision: "
            f"{few(half)}\n"
            f"  legal: frozen parameters in half precision, beside trained ones in fp32\n"
            f"  fix:   amp_graph.convert(model, '{policy},widen=true'), which holds trained parameters in fp32 until "
            "amp_graph.revert; or amp_graph.convert(model.float()); or level O2, which holds them in low precision"
        )


def warn_of_unmatched(model: torch.nn.Module, policy: Policy) -> None:
    """Warn of what ``policy`` keeps in fp32 by the paths of modules that ``model`` does not have."""
    paths = [name for name, _ in model.named_modules()]
    absent = [key for key in policy.keep_ops if module_of(key) not in paths]
    if policy.keep_fp32 and not any(map(policy.keeps_fp32, paths)):
        told, legal = f"keep_fp32={policy.keep_fp32!r}", "a regular expression that matches a whole path, such as "
    elif absent:
        told, legal = f"keep_ops={'|'.join(absent)!r}", "a path and an operation, such as "
    else:
        return
    leaves = [name for name, part in model.named_modules() if name and not list(part.children())]
    warn(
        f"amp_graph: {told} matches no module of {type(model).__name__}, so it keeps nothing in fp32\n"
        f"  legal: {legal}{few([f'{name}:linear' for name in leaves] if absent else leaves)}",
    )


def _warn_of_other_machine(model: torch.nn.Module, policy: Policy) -> None:
    here = machine_name(device_of_model(model) or "cpu")
    if policy.measured_on not in ("", here):
        warn(
            f"convert: the time, memory and error of '{policy}' were measured on {policy.measured_on}, and not on this "
            f"{here}, where another policy may be faster\n  fix: amp_graph.search(model, step) here"
        )
