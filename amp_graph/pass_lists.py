"""Which passes run over a graph, in which order: by the policy, and by what will run the graph.

Before: ``Policy.parse("bf16")`` and "cpu". After: ``[IdentifyOps(), ..., PlanPrecision(...), InsertCasts(...), ...]``.
"""

from __future__ import annotations

import torch

from amp_graph.passes.accumulate_in_place import AccumulateInPlace
from amp_graph.passes.align_shapes import AlignShapes
from amp_graph.passes.amx_products import AmxProducts
from amp_graph.passes.attention import Attention
from amp_graph.passes.base import Pass
from amp_graph.passes.cast_parts import CastParts
from amp_graph.passes.channels_last import ChannelsLast
from amp_graph.passes.contiguous_linear import ContiguousLinear
from amp_graph.passes.conv1d import Conv1d
from amp_graph.passes.conv_as_linear import ConvAsLinear
from amp_graph.passes.conv_transpose import ConvTranspose
from amp_graph.passes.convolution import Convolution
from amp_graph.passes.count_batches import CountBatches
from amp_graph.passes.custom_activations import CustomActivations
from amp_graph.passes.depthwise import Depthwise
from amp_graph.passes.drop_dropout import DropDropout
from amp_graph.passes.drop_empty import DropEmpty
from amp_graph.passes.einsums_as_products import EinsumsAsProducts
from amp_graph.passes.eliminate_casts import EliminateCasts
from amp_graph.passes.expand import ExpandComposites
from amp_graph.passes.fold_masks import FoldMasks
from amp_graph.passes.fold_norms import FoldNorms
from amp_graph.passes.fuse_attention import FuseAttention
from amp_graph.passes.fuse_batch_norm import FuseBatchNorm
from amp_graph.passes.fuse_bias import FuseBias
from amp_graph.passes.fuse_dropout import FuseDropout
from amp_graph.passes.fuse_gelu import FuseGelu
from amp_graph.passes.fuse_group_norm import FuseGroupNorm
from amp_graph.passes.fuse_norm import FuseNorm
from amp_graph.passes.fuse_rms_norm import FuseRmsNorm
from amp_graph.passes.global_pool import GlobalPool
from amp_graph.passes.group_weight_casts import GroupWeightCasts
from amp_graph.passes.grouped_product import GroupedProducts
from amp_graph.passes.identify_ops import IdentifyOps
from amp_graph.passes.insert_casts import InsertCasts
from amp_graph.passes.keep_gradient_memory import KeepGradientMemory
from amp_graph.passes.keep_large_results import KeepLargeResults
from amp_graph.passes.keep_recurrent import CudnnRecurrent, GruState, KeepRecurrent, LstmBackward
from amp_graph.passes.keep_weight_copies import KeepWeightCopies
from amp_graph.passes.lay_gradients import LayGradients
from amp_graph.passes.linear_cross_entropy import LinearCrossEntropy
from amp_graph.passes.linears_of_parameters import LinearsOfParameters
from amp_graph.passes.look_at_values import LookAtValues
from amp_graph.passes.machine import class_of, machine_for
from amp_graph.passes.measure_influence import Measured
from amp_graph.passes.overwrite_logits import OverwriteLogits
from amp_graph.passes.own_products import OwnProducts
from amp_graph.passes.pack_weights import PackWeights
from amp_graph.passes.plan_precision import PlanPrecision
from amp_graph.passes.pointwise_conv import PointwiseConv
from amp_graph.passes.products_as_linears import ProductsAsLinears
from amp_graph.passes.protect_norms import ProtectNorms
from amp_graph.passes.recompute_activations import RecomputeActivations
from amp_graph.passes.reduce_from_low import ReduceFromLow
from amp_graph.passes.share_casts import ShareCasts
from amp_graph.passes.small_linears import SmallLinears
from amp_graph.passes.small_products import SmallProducts
from amp_graph.passes.table_activations import TableActivations
from amp_graph.passes.train_linears import TrainLinears
from amp_graph.passes.weight_copies import WeightCopies
from amp_graph.passes.what_pays_computed_again import fewest_computed_again
from amp_graph.passes.widen_large import WidenLarge
from amp_graph.passes.widen_products import WidenProducts
from amp_graph.policy import Policy


def passes_for(
    policy: Policy,
    device: str,
    measured: tuple[Measured, ...] = (),
    *,
    eager: bool = False,
    in_step: bool = False,
) -> list[Pass]:
    """Return the passes of ``policy``, in order; ``eager``: with those for graphs that run as they are.

    What those do, compilers do by themselves. ``in_step``: the graph will be a part of that of a whole step, into which
    kernels of ours for images are traced whoever compiles it: Inductor's batch norms and 1x1 convolutions are slower.
    """
    lists = policy.op_list(device)
    dtype = policy.torch_dtype(device)
    planned_for = policy.device or device
    # A reproduction of PyTorch's own policy runs what the user wrote, operation by operation.
    ours = lists.unlisted == "opaque"
    folds = policy.weight_copies and "fold_norms" not in policy.skip and not torch.is_grad_enabled()
    fusions: list[Pass] = (
        [
            DropEmpty(),
            DropDropout(),
            EinsumsAsProducts(lists),
            ProductsAsLinears(lists),
            FuseGelu(),
            FuseRmsNorm(),
            ConvAsLinear(folds),
        ]
        if ours
        else []
    )
    if ours and "attention" not in policy.skip:  # torch's kernel takes longer than the formula
        fusions.append(FuseAttention(lists, dtype, planned_for, policy.keep_fp32))
    if ours:
        fusions.append(FoldMasks())
    on_cpu = planned_for == "cpu"
    keeps_weights = eager and on_cpu and policy.weight_copies and not torch.is_grad_enabled()
    counts = on_cpu or machine_for(device) is not class_of(device)  # rates of GPUs were read, not measured
    pointwise: list[Pass] = [PointwiseConv(folds)] if eager or in_step else []
    batch_norms: list[Pass] = [FuseBatchNorm()] if eager or in_step else []
    again = RecomputeActivations(
        thorough=policy.recomputes != "some",
        sparing=policy.recomputes == "most",
        fewest=0 if policy.recomputes == "all" else fewest_computed_again(planned_for, in_step),
    )
    kernels: list[Pass] = [
        *([CustomActivations()] if eager else []),
        Attention(),
        GruState(),
        LstmBackward(),
        CudnnRecurrent(),
        ContiguousLinear(),
        ReduceFromLow(planned_for),
        ChannelsLast(),
        *pointwise,
        Convolution(),
        ConvTranspose(),
        Depthwise(),
        *([Conv1d()] if eager else []),
        GlobalPool(),
        FuseGroupNorm(),
        AlignShapes(planned_for),
        *batch_norms,
        *(
            [
                LinearCrossEntropy(),
                FuseNorm(),
                FuseDropout(),
                TableActivations(),
                again,
                GroupedProducts(),
                SmallLinears(),
                TrainLinears(in_step),
                CountBatches(planned_for),
                CastParts(),
                WidenLarge(),
            ]
            if eager
            else []
        ),
    ]
    found = [
        IdentifyOps(),
        *fusions,
        ExpandComposites(lists),
        PlanPrecision(
            lists,
            dtype,
            policy.accuracy,
            policy.keep_fp32,
            policy.keep_outputs,
            policy.plans_by,
            policy.leaves,
            measured,
            keeps_weights,
            eager and counts,
            in_step,
        ),
        InsertCasts(dtype, policy.keep_outputs),
        EliminateCasts(),
        *([OwnProducts()] if ours else []),
        ShareCasts(),
        ProtectNorms(),
        *(kernels if ours else []),
    ]
    return _wanted(found, policy)


def passes_for_compilers(policy: Policy) -> list[Pass]:
    """Return the passes over a rewritten graph that a compiler will take apart."""
    return _wanted([KeepRecurrent()], policy)


def passes_in_inductor(policy: Policy, device: str) -> list[Pass]:
    """Return the passes of ``policy`` over the flat graphs that Inductor makes its code from."""
    return (
        _wanted([FuseBias(), AmxProducts(), SmallProducts(), LayGradients()], policy)
        if policy.op_list(device).unlisted == "opaque"
        else []
    )


def passes_for_inductor(policy: Policy, user: object) -> list[Pass]:
    """Return the passes for captured graphs that Inductor compiles, of which ``user`` is the owner."""
    ours = torch.is_grad_enabled() and policy.weight_copies and policy.op_list("cpu").unlisted == "opaque"
    return _wanted([KeepGradientMemory(user=user)], policy) if ours else []


def passes_of_step(policy: Policy, device: str) -> list[Pass]:
    """Return the passes of ``policy`` over the flat graph of a whole step that runs as it is."""
    ours = policy.op_list(device).unlisted == "opaque"
    return _wanted([FuseBias(), AmxProducts(), AccumulateInPlace(), OverwriteLogits()], policy) if ours else []


def passes_of_copies(copies: WeightCopies | None, policy: Policy, device: str) -> list[Pass]:
    """Return the passes for eager graphs that read weights which outlive the call; asked while a graph is captured."""
    if copies is None:
        return []
    more: list[Pass] = []
    if policy.op_list(device).unlisted == "opaque":
        trains = [KeepGradientMemory(copies.gradients), LinearsOfParameters(copies)]
        more = trains if torch.is_grad_enabled() else _for_inference(copies, policy)
    return _wanted([KeepWeightCopies(copies), GroupWeightCasts(copies, device), *more], policy)


def _for_inference(copies: WeightCopies, policy: Policy) -> list[Pass]:
    kept: list[Pass] = [KeepLargeResults(copies.results), WidenProducts(copies)] if policy.keeps_memory else []
    return [FoldNorms(copies), PackWeights(copies), LookAtValues(copies), *kept]


def _wanted(passes: list[Pass], policy: Policy) -> list[Pass]:
    return [one for one in passes if one.name.replace("-", "_") not in policy.skip]
