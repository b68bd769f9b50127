"""Find code that reads a dtype and so upcasts low values: ``y.to(x.dtype)``, a custom ``autograd.Function`` of ``x``.

Before: captured in fp32, the code reads fp32, and its fp32 result upcasts low values. After: this is known, and the
call can be captured under ``torch.autocast``, where the code reads the dtype that it would read there.
"""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node
from torch.utils._pytree import tree_leaves

from amp_graph.lists import OpClass
from amp_graph.passes.autocast_regions.autocast_subgraphs import bits_shown, refusal
from amp_graph.passes.graph.autograd_functions import is_custom_function
from amp_graph.passes.graph.fake_values import value
from amp_graph.passes.graph.meta_keys import RAISES
from amp_graph.passes.precision.conditioning import leads_to_softmax
from amp_graph.passes.precision.planning_problem import LOW, Problem
from amp_graph.passes.precision.rule_based_planner import RuleBasedPlan
from amp_graph.passes.torch_compat.dynamo_patches import is_gradient_hook, reads_of_dtype

PASSED_ON = (OpClass.FOLLOW, OpClass.NEUTRAL, OpClass.PROMOTE)


def raised_by_read_dtypes(problem: Problem, low: torch.dtype) -> bool:
    """Say whether code captured in fp32 upcasts values that the rule-based planner makes low (dtype ``low``).

    Such code is a custom function, or makes values with a ``dtype`` argument after it read the dtype of a low value.
    False for a graph that could not be planned after a capture under autocast. Asks the rule-based planner, which
    lowers all that autocast would: a planner by cost may keep a value full because of the upcast behind it. A mask that
    is converted counts as none: a softmax reads its sum with the scores, and ``low`` may not hold its values.
    """
    gm = problem.gm
    functions = [node for node in gm.graph.nodes if is_custom_function(node) and not is_gradient_hook(node)]
    reads = [node for node in gm.graph.nodes if reads_of_dtype(node)]
    if not (functions or reads) or refusal(gm, low):
        return False
    painting = RuleBasedPlan(problem)
    choices = painting.run()

    def is_low(node: Node) -> bool:
        return node in painting.low or _is(node, low)

    if _shows_bits([node for node in problem.classes if is_low(node) or choices[node].precision == LOW], problem):
        return False
    if any(is_low(source) for node in functions for source in node.all_input_nodes):
        return True
    if not any(map(is_low, reads)):
        return False
    masks = leads_to_softmax(gm.graph.nodes, problem.classes)
    reached = {node for node in gm.graph.nodes if _asks_fp32(node) and not is_low(node)}
    reached -= {node for node in reached & masks if problem.classes[node].conversion}
    for node in gm.graph.nodes:
        kind = problem.classes.get(node)
        if kind is None or kind.cls not in PASSED_ON or is_low(node) or not _is(node, torch.float32):
            continue
        if not reached.isdisjoint(node.all_input_nodes):
            if any(map(is_low, node.all_input_nodes)):
                return True
            reached.add(node)
    return False


def _shows_bits(lowered: list[Node], problem: Problem) -> bool:
    """Say whether code reads the bits of values that autocast would lower: under autocast the bits would differ."""
    storages = problem.memory.storages
    keys: frozenset[int] = frozenset().union(*(storages[node] for node in lowered))
    showing = (node for node in problem.gm.graph.nodes if bits_shown(node))
    return any(keys & storages[source] for node in showing for source in node.all_input_nodes)


def has_raised(gm: GraphModule) -> bool:
    """Say whether the planned ``gm`` is better captured under autocast."""
    return bool(gm.meta.get(RAISES))


def _is(node: Node, dtype: torch.dtype) -> bool:
    found = value(node)
    return isinstance(found, torch.Tensor) and found.dtype == dtype


def _asks_fp32(node: Node) -> bool:
    """Say whether the user passed ``torch.float32`` to the call ``node``."""
    return _is(node, torch.float32) and any(
        leaf is torch.float32 for leaf in tree_leaves((node.args, dict(node.kwargs)))
    )
