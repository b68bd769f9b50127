"""Activation checkpoints: planned as part of the surrounding graph, run as checkpoints.

Before: ``tag_activation_checkpoint(body, x, w)``. During planning: the body's nodes are inline, each marked with its
checkpoint. After: ``checkpoint(body', x', w)`` again, where ``x'`` may be low precision.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from amp_graph.passes.graph import node_info
from amp_graph.passes.graph.edit import inline, replace_by
from amp_graph.passes.graph.fake_values import value
from amp_graph.passes.graph.meta_keys import CAST, CHECKPOINT, GRAD, IDENTITY, INPUT, MARK, REGION


def place_of(node: Node) -> tuple[Any, ...]:
    """Return the properties that nodes must share to be merged: grad mode, checkpoint, and the user's region."""
    return node.meta.get(GRAD, True), node.meta.get(CHECKPOINT), node.meta.get(REGION)


def inline_checkpoints(gm: GraphModule) -> None:
    """Inline the bodies of checkpoints into ``gm``; selective checkpoints, whose policy sees operations, stay."""
    number = 0
    for node in list(gm.graph.nodes):
        if getattr(node.target, "__name__", "") != "tag_activation_checkpoint":
            continue
        attribute: Any = node.args[0]
        body = getattr(gm, str(attribute.target))
        taken_apart = all(user.target is operator.getitem for user in node.users)
        if "_checkpoint_context_fn" in body.meta or node.kwargs.get("context_fn") or not taken_apart:
            continue
        inline_checkpoints(body)
        _inline(gm, node, body, number)
        number += 1
    if number:
        gm.graph.eliminate_dead_code(lambda n: n.op != "get_attr")
        gm.delete_all_unused_submodules()
        gm.recompile()


def _inline(gm: GraphModule, node: Node, body: GraphModule, number: int) -> None:
    attribute: Any = node.args[0]

    def held(part: Node) -> Node:
        name = f"{attribute.target}_{part.target}".replace(".", "_")
        setattr(gm, name, getattr(body, str(part.target)))
        found = gm.graph.get_attr(name)
        found.meta = dict(part.meta)
        return found

    outputs, made = inline(gm, body.graph, node.args[1:], node, held)
    for part in made:
        part.meta[CHECKPOINT] = number
    replace_by(node, outputs)


def outline_checkpoints(gm: GraphModule, *, traced: bool = False) -> None:
    """Move each checkpoint's nodes back into a body, called through ``torch.utils.checkpoint``.

    traced: the graph will be traced with its backward, so that the trace contains the recomputation. Then bodies that
    draw random numbers stay inline, as a trace cannot draw the same numbers twice.
    """
    regions: dict[int, list[Node]] = {}
    for node in gm.graph.nodes:
        if CHECKPOINT in node.meta:
            regions.setdefault(node.meta[CHECKPOINT], []).append(node)
    for number, nodes in regions.items():
        if not (traced and _may_draw(nodes)):
            _outline(gm, number, nodes, keeps_random_state=not traced)
    gm.recompile()


def _may_draw(nodes: list[Node]) -> bool:
    """Say whether ``nodes`` may draw random numbers; nodes without identity, which passes inserted, do not."""
    known = [n.meta[IDENTITY] for n in nodes if IDENTITY in n.meta]
    return not known or any(node_info.draws(o.op, o.arguments) for operations in known for o in operations)


def tag_checkpoints(gm: GraphModule) -> None:
    """Tell a compiler's partitioner which nodes to recompute, as the captured operator would have."""
    for node in gm.graph.nodes:
        if CHECKPOINT in node.meta:
            node.meta["recompute"] = torch.utils.checkpoint.CheckpointPolicy.PREFER_RECOMPUTE
            node.meta["ac_graph_id"] = node.meta[CHECKPOINT] + 1


def _outline(gm: GraphModule, number: int, nodes: list[Node], keeps_random_state: bool) -> None:
    inside = set(nodes)
    reads = dict.fromkeys(s for n in nodes for s in n.all_input_nodes if s not in inside)
    results = [n for n in nodes if any(user not in inside for user in n.users)]
    graph = Graph()
    env = {}
    for source in reads:
        env[source] = graph.placeholder(source.name)
        env[source].meta["val"] = value(source)
        if INPUT in source.meta:
            env[source].meta[INPUT] = source.meta[INPUT]
    for node in nodes:
        env[node] = graph.node_copy(node, lambda n: env[n])
    graph.output(tuple(env[n] for n in results))
    name = f"amp_checkpoint_{number}"
    setattr(gm, name, GraphModule(gm, graph))
    with gm.graph.inserting_after(nodes[-1]):
        body = gm.graph.get_attr(name)
    with gm.graph.inserting_after(body):
        call = gm.graph.call_function(run_checkpoint, (body, *reads), {"keeps_random_state": keeps_random_state})
    last = call
    for index, node in enumerate(results):
        with gm.graph.inserting_after(last):
            last = gm.graph.call_function(operator.getitem, (call, index))
        last.meta = {k: v for k, v in node.meta.items() if k not in (CHECKPOINT, MARK, CAST)}
        node.replace_all_uses_with(last, delete_user_cb=lambda user: user not in inside)
    for node in reversed(nodes):
        gm.graph.erase_node(node)


def run_checkpoint(body: GraphModule, *args: Any, keeps_random_state: bool = True) -> Any:
    """Run ``body`` without saving its activations; backward runs it again.

    Always non-reentrant: the reentrant kind differs only in how it enters autograd. Tensors without gradients (buffers,
    masks) are captured by the closure, like a module's buffers: the body may write to them. The random state cannot be
    read while a CUDA graph is recorded; no checkpoint is that draws.
    """
    recorded = torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
    trained = [i for i, a in enumerate(args) if isinstance(a, torch.Tensor) and a.requires_grad]

    def run(*given: torch.Tensor) -> Any:
        all_args = list(args)
        for i, tensor in zip(trained, given, strict=True):
            all_args[i] = tensor
        return body(*all_args)

    given, keeps = [args[i] for i in trained], keeps_random_state and not recorded
    return torch.utils.checkpoint.checkpoint(run, *given, use_reentrant=False, preserve_rng_state=keeps)
