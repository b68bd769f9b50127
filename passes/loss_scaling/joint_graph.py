"""What a joint graph is: forward and backward in one graph of ATen operators, which names its loss and gradients.

Before: a graph from ``make_fx``, ``aot_module`` or ``aot_export_module``. After: ``joint_of(gm).gradients["fc.bias"]``
is the number of the output that is the gradient of ``fc.bias``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch.fx import GraphModule, Node
from torch.fx.graph import CodeGen
from torch.utils._pytree import tree_map_only

from amp_graph.passes.base import Pass, PassError, Writes
from amp_graph.passes.graph.fake_values import tensors, value
from amp_graph.passes.graph.liveness import Lifetimes
from amp_graph.passes.graph.meta_keys import JOINT
from amp_graph.passes.torch_compat.fake import FakeTensor, FakeTensorMode, empty_meta, fake_of
from amp_graph.passes.torch_compat.storage import storage_key

UPDATES = ("update-parameters",)  # passes that read the gradients last


class JointPass(Pass):
    """A pass that appends a part of a training step to a joint graph: without it, the step would be another one."""

    required: ClassVar[bool] = True
    writes: ClassVar[Writes] = Writes.APPENDED


APART = "amp_values_apart"  # meta key of a graph: its values do not show which of them share memory
ONES = (torch.ops.aten.ones_like.default, torch.ops.aten.full_like.default)


@dataclass(frozen=True)
class JointGraph:
    """The names of a joint graph's parts, kept in ``gm.meta``; passes read it, and store what they change.

    loss, found_inf, and the values of ``gradients``: numbers of outputs. Outputs are added behind the others, so a
    number is valid for as long as the graph lives. seed: the node that is the gradient of the loss, where backward
    starts. parameters: the input that an update of each parameter writes. scale: the input that gradients are
    multiplied by at present, or "". norm: the node that is the norm of gradients where they are shards, or "".
    skips: by name of parameter, the node that is above 0 where no rank has its gradient: it is not updated then.
    done: names of the passes that read or changed the gradients, in order. inputs: those that passes added, in order;
    the caller supplies their tensors behind all others.
    """

    loss: int
    gradients: Mapping[str, int]
    seed: str
    parameters: Mapping[str, str] = field(default_factory=dict)
    scale: str = ""
    skips: Mapping[str, str] = field(default_factory=dict)
    norm: str = ""
    found_inf: int | None = None
    done: tuple[str, ...] = ()
    inputs: tuple[str, ...] = ()


def name_joint(
    gm: GraphModule,
    gradients: Mapping[str, int | str | Node],
    *,
    loss: int | str | Node = 0,
    seed: str | Node | None = None,
    parameters: Mapping[str, str | Node] | None = None,
) -> JointGraph:
    """Store which outputs of ``gm`` are its loss and its gradients, so that passes can be appended; return the names.

    gradients: by name of parameter, in the order in which norms are added up. An output is given by its number, its
    node, or its node's name. seed: the node where backward starts; None finds it: the input for the gradient of the
    only output (``tangents_1``), or ``ones_like(loss)``. parameters: the input of each parameter, for updates.

    The graph is called with a flat list of inputs from now on, and returns a flat tuple. Raises PassError where a name
    is not in the graph, the loss is no single number, or values are missing.
    """
    gm.graph.set_codegen(CodeGen())  # what AOTAutograd makes takes (primals, tangents), where no input can be added
    _one_mode(gm)
    outs = outputs(gm)
    loss_number = _number(outs, loss, "the loss")
    loss_node = outs[loss_number]
    found = value(loss_node)
    if not isinstance(found, torch.Tensor) or found.numel() != 1 or not found.is_floating_point():
        raise PassError(
            f"joint graph: output {loss_number}, {loss_node.name}, is no loss\n"
            "  legal: a tensor of one floating-point number\n  fix:   name_joint(gm, gradients, loss=its number)"
        )
    numbers = {name: _number(outs, given, f"the gradient of {name}") for name, given in gradients.items()}
    inputs = input_nodes(gm)
    known = {name: given if isinstance(given, str) else given.name for name, given in (parameters or {}).items()}
    if missing := next((n for n in known.values() if n not in inputs), None):
        raise PassError(f"joint graph: {missing} is no input\n  legal: {', '.join(sorted(inputs))}")
    joint = JointGraph(loss_number, numbers, _seed(gm, loss_node, seed).name, known)
    gm.meta[JOINT] = joint
    return joint


def name_exported(gm: GraphModule, signature: Any) -> JointGraph:
    """Name the parts of a joint graph of ``aot_export_module(..., trace_joint=True)`` by the signature with it."""
    backward = signature.backward_signature
    gradients = {parameter: out for out, parameter in backward.gradients_to_parameters.items()}
    parameters = {parameter: given for given, parameter in signature.inputs_to_parameters.items()}
    return name_joint(gm, gradients, loss=backward.loss_output, parameters=parameters)


def joint_of(gm: GraphModule) -> JointGraph:
    """Return what ``name_joint`` stored and passes have changed since; PassError for a graph without names."""
    found = gm.meta.get(JOINT)
    if not isinstance(found, JointGraph):
        raise PassError(
            "joint graph: it does not say which outputs are its loss and its gradients\n"
            '  fix:   name_joint(gm, {"weight": 1, "bias": 2}, loss=0), or name_exported(gm, signature)'
        )
    return found


def refuse_behind(gm: GraphModule, name: str, *later: str) -> None:
    """Raise PassError if one of the passes ``later`` ran over the graph: it read what the pass ``name`` changes."""
    found = next((one for one in joint_of(gm).done if one in later), None)
    if found is not None:
        raise PassError(
            f"pass {name}: {found} ran over the graph already, and read gradients that {name} changes\n"
            f"  legal: {name} first, then {found}\n  fix:   run them in this order, over a graph without either"
        )


def record_done(gm: GraphModule, name: str) -> None:
    """Store that the pass ``name`` ran over the graph."""
    change_joint(gm, done=(*joint_of(gm).done, name))


def change_joint(gm: GraphModule, **changes: Any) -> JointGraph:
    """Store and return the names of ``gm`` with these changed."""
    gm.meta[JOINT] = joint = replace(joint_of(gm), **changes)
    return joint


def outputs(gm: GraphModule) -> list[Any]:
    """Return what the graph returns, one a number: nodes, constants, None."""
    found: Any = gm.graph.output_node().args[0]
    return list(found) if isinstance(found, (tuple, list)) else [found]


def set_outputs(gm: GraphModule, found: list[Any]) -> None:
    """Return these from now on."""
    gm.graph.output_node().args = (tuple(found),)


def gradient_nodes(gm: GraphModule) -> list[Node]:
    """Return the gradients of ``gm``, in order."""
    outs = outputs(gm)
    return [outs[number] for number in joint_of(gm).gradients.values()]


def set_gradients(gm: GraphModule, found: list[Node]) -> None:
    """Put other nodes in the place of the gradients."""
    outs = outputs(gm)
    for number, node in zip(joint_of(gm).gradients.values(), found, strict=True):
        outs[number] = node
    set_outputs(gm, outs)


def node_named(gm: GraphModule, name: str) -> Node:
    """Return the node of this name."""
    found = next((n for n in gm.graph.nodes if n.name == name), None)
    if found is None:
        raise PassError(f"joint graph: {name} is no node of it any more\n  fix:   name_joint(gm, ...) once more")
    return found


def parameter_nodes(gm: GraphModule, names: Sequence[str]) -> list[Node]:
    """Return the inputs that an update of these parameters writes."""
    known = input_nodes(gm)
    inputs = joint_of(gm).parameters
    if missing := next((name for name in names if inputs.get(name) not in known), None):
        raise PassError(
            f"joint graph: no input is named as that of the parameter {missing}\n"
            "  fix:   name_joint(gm, gradients, parameters={name: input})"
        )
    return [known[inputs[name]] for name in names]


def input_nodes(gm: GraphModule) -> dict[str, Node]:
    """Return the inputs of ``gm`` by name, in order."""
    return {n.name: n for n in gm.graph.find_nodes(op="placeholder")}


def found_inf_node(gm: GraphModule) -> Node | None:
    """Return the verdict on the gradients, or None where no pass has looked at them."""
    number = joint_of(gm).found_inf
    return None if number is None else outputs(gm)[number]


def shared_gradients(gm: GraphModule) -> list[bool]:
    """Say of each gradient whether its memory is also an input's, another output's, or an earlier gradient's.

    Or that of several of its own elements, as in a gradient that was expanded.
    """
    own = gradient_nodes(gm)
    others = [n for n in outputs(gm) if isinstance(n, Node) and n not in own]
    others += gm.graph.find_nodes(op="placeholder")
    lives = Lifetimes.of(gm) if APART in gm.meta else None
    memory: Callable[[Node], frozenset[Any]] = _storages if lives is None else lives.roots.__getitem__
    known = set[Any]().union(*map(memory, others))
    found = []
    for node in own:
        keys = memory(node)
        found.append(_is_expanded(node) or bool(keys & known))
        known |= keys
    return found


def _is_expanded(node: Node) -> bool:
    steps = ((step, size) for t in tensors(value(node)) for step, size in zip(t.stride(), t.shape, strict=True))
    return any(step == 0 and size != 1 for step, size in steps)


def _storages(node: Node) -> frozenset[Any]:
    return frozenset(key for t in tensors(value(node)) if (key := storage_key(t)) is not None)


def _number(outs: list[Any], given: int | str | Node, what: str) -> int:
    names = [out.name if isinstance(out, Node) else None for out in outs]
    if isinstance(given, int):
        found = given if given < len(outs) else None
    else:
        name = given if isinstance(given, str) else given.name
        found = names.index(name) if name in names else None
    if found is None or not isinstance(outs[found], Node):
        raise PassError(
            f"joint graph: {what} is given as {given!r}, which is no output that is a tensor\n"
            f"  legal: 0 to {len(outs) - 1}, or one of {', '.join(n for n in names if n)}"
        )
    return found


def _seed(gm: GraphModule, loss: Node, given: str | Node | None) -> Node:
    if given is not None:
        return given if isinstance(given, Node) else node_named(gm, given)
    tangents = [n for n in gm.graph.find_nodes(op="placeholder") if n.name.startswith("tangents_")]
    found = tangents or [n for n in loss.users if n.target in ONES]
    # The loss may be returned by way of a view or detach, which backward does not start from.
    for source in loss.all_input_nodes if not found else ():
        found = found or [n for n in source.users if n.target in ONES]
    if len(found) != 1:
        raise PassError(
            f"joint graph: backward starts from {len(found) or 'no'} node{'s' if len(found) > 1 else ''} that could be "
            f"the gradient of {loss.name}\n  fix:   name_joint(gm, gradients, seed=its node)"
        )
    return found[0]


def _one_mode(gm: GraphModule) -> None:
    """Have all values belong to one fake mode: a trace of real tensors gives each a mode of its own."""
    found = [t for n in gm.graph.nodes for t in tensors(value(n)) if isinstance(t, FakeTensor)]
    if not found:
        raise PassError(
            "joint graph: its nodes have no values\n"
            '  fix:   make_fx(step, tracing_mode="fake")(*inputs), or FakeTensorProp(gm).propagate(*inputs)'
        )
    if len({id(t.fake_mode) for t in found}) == 1:
        return
    mode = found[0].fake_mode
    for node in gm.graph.nodes:
        if tensors(value(node)):
            node.meta["val"] = tree_map_only(torch.Tensor, lambda t: like_in(mode, t), value(node))
    gm.meta[APART] = True


def like_in(mode: FakeTensorMode, tensor: torch.Tensor) -> torch.Tensor:
    """Return a new fake tensor of ``mode`` with sizes, strides, dtype and device of ``tensor``."""
    return fake_of(mode, tensor.device, lambda: empty_meta(tensor, tensor.dtype))
