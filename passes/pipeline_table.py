"""The table of all passes, in the order in which they run: a row a pass.

Before: ``PipelineOptions``. After: ``[row.built(options) for row in TABLE if ...]``, see ``pipeline.py``.
"""

from __future__ import annotations

from amp_graph.passes.backends.cpu.attention.lower_attention import Attention
from amp_graph.passes.backends.cpu.convolution.conv1d_as_gemm import Conv1d
from amp_graph.passes.backends.cpu.convolution.conv_weight_gradient import Convolution
from amp_graph.passes.backends.cpu.convolution.depthwise_conv_gradients import Depthwise
from amp_graph.passes.backends.cpu.convolution.lower_pointwise_conv import PointwiseConv
from amp_graph.passes.backends.cpu.convolution.transposed_conv_bias_gradient import ConvTranspose
from amp_graph.passes.backends.cpu.inference.chunk_upcast_linears import WidenProducts
from amp_graph.passes.backends.cpu.inference.elide_nan_handling import LookAtValues
from amp_graph.passes.backends.cpu.inference.fold_batch_norms import FoldNorms
from amp_graph.passes.backends.cpu.inference.prepack_weights import PackWeights
from amp_graph.passes.backends.cpu.linear.fuse_addmm_bias import FuseBias
from amp_graph.passes.backends.cpu.linear.fuse_casts_into_linears import LinearsOfParameters
from amp_graph.passes.backends.cpu.linear.gram_matrix import OwnProducts
from amp_graph.passes.backends.cpu.linear.grouped_gemm import GroupedProducts
from amp_graph.passes.backends.cpu.linear.lower_large_linears import TrainLinears
from amp_graph.passes.backends.cpu.linear.lower_small_linears import SmallLinears
from amp_graph.passes.backends.cpu.linear.lower_weight_gradients import AmxProducts
from amp_graph.passes.backends.cpu.loss.fuse_cross_entropy import LinearCrossEntropy
from amp_graph.passes.backends.cpu.loss.logits_gradient_in_place import OverwriteLogits
from amp_graph.passes.backends.cpu.norm.fuse_add_norm import FuseNorm
from amp_graph.passes.backends.cpu.norm.fuse_batch_norm_relu import FuseBatchNorm
from amp_graph.passes.backends.cpu.norm.lower_group_norm import FuseGroupNorm
from amp_graph.passes.backends.cpu.pointwise.lookup_activations import TableActivations
from amp_graph.passes.backends.cpu.pointwise.lookup_custom_activations import CustomActivations
from amp_graph.passes.backends.cpu.pointwise.lower_dropout import FuseDropout
from amp_graph.passes.backends.cuda.fold_upcasts_into_reductions import ReduceFromLow
from amp_graph.passes.backends.cuda.foreach_batch_counters import CountBatches
from amp_graph.passes.backends.cuda.pad_shapes import AlignShapes
from amp_graph.passes.backends.inductor.contiguous_weight_gradients import LayGradients
from amp_graph.passes.backends.inductor.lower_small_gemm import SmallProducts
from amp_graph.passes.backends.recurrent.lower_rnn import CudnnRecurrent, GruState, KeepRecurrent, LstmBackward
from amp_graph.passes.base import Pass
from amp_graph.passes.casts.eliminate_casts import EliminateCasts
from amp_graph.passes.casts.insert_casts import InsertCasts
from amp_graph.passes.casts.layer_norm_fp32_gradients import ProtectNorms
from amp_graph.passes.casts.share_casts import ShareCasts
from amp_graph.passes.graph.identify_ops import IdentifyOps
from amp_graph.passes.layout.channels_last import ChannelsLast
from amp_graph.passes.layout.contiguous_linear_input import ContiguousLinear
from amp_graph.passes.layout.global_avg_pool_gradient import GlobalPool
from amp_graph.passes.layout.sink_casts_into_concat import CastParts
from amp_graph.passes.memory.accumulate_in_place import AccumulateInPlace
from amp_graph.passes.memory.recompute_activations import RecomputeActivations
from amp_graph.passes.memory.reuse_embedding_gradients import KeepGradientMemory
from amp_graph.passes.memory.reuse_output_buffers import KeepLargeResults
from amp_graph.passes.memory.upcast_into_huge_pages import WidenLarge
from amp_graph.passes.pipeline_options import PipelineOptions
from amp_graph.passes.pipeline_row import (
    BIT_EXACT,
    EAGER,
    EAGER_OR_STEP,
    INFERENCE,
    KEEP_MEMORY,
    OPAQUE,
    ROUNDING_EQUAL,
    TRAINING,
    Phase,
    Row,
    Stage,
    approximate,
    checked,
)
from amp_graph.passes.precision.decompose_composites import ExpandComposites
from amp_graph.passes.precision.machine_rates import class_of, machine_for
from amp_graph.passes.precision.plan_precision import PlanPrecision
from amp_graph.passes.profitability.recompute_thresholds import fewest_computed_again
from amp_graph.passes.recognize.attention import FuseAttention
from amp_graph.passes.recognize.constant_attention_masks import FoldMasks
from amp_graph.passes.recognize.conv_to_linear import ConvAsLinear
from amp_graph.passes.recognize.einsum_to_matmul import EinsumsAsProducts
from amp_graph.passes.recognize.empty_concat_operands import DropEmpty
from amp_graph.passes.recognize.gelu import FuseGelu
from amp_graph.passes.recognize.matmul_to_linear import ProductsAsLinears
from amp_graph.passes.recognize.no_op_dropout import DropDropout
from amp_graph.passes.recognize.rms_norm import FuseRmsNorm
from amp_graph.passes.weights.batch_weight_casts import GroupWeightCasts
from amp_graph.passes.weights.cache_weight_casts import KeepWeightCopies
from amp_graph.passes.weights.cast_cache import WeightCopies

CPU, CUDA = ("cpu",), ("cuda",)
RECOGNIZE, PRECISION, CASTS, LAYOUT = Stage.RECOGNIZE, Stage.PRECISION, Stage.CASTS, Stage.LAYOUT
MEMORY, WEIGHTS, BACKEND = Stage.MEMORY, Stage.WEIGHTS, Stage.BACKEND
COPIES, COMPILED, HANDOVER, INDUCTOR, STEP = (
    (Phase.COPIES,), (Phase.COMPILED,), (Phase.HANDOVER,), (Phase.INDUCTOR,), (Phase.STEP,)
)  # fmt: skip
# Lists that reproduce torch.autocast run what the user wrote, operation by operation: conditions without OPAQUE are of
# passes that make the plan and its casts, and no more.
OURS, RUNS, TRAINS, INFERS = (OPAQUE,), (OPAQUE, EAGER), (OPAQUE, TRAINING), (OPAQUE, INFERENCE)


def _folds(options: PipelineOptions) -> bool:
    """Say whether batch norms in evaluation will be folded into convolutions."""
    return options.weight_copies and not options.training and "fold-norms" not in options.skip


def _plan(o: PipelineOptions) -> Pass:
    on_cpu = o.planned_for == "cpu"
    keeps_weights = o.eager and on_cpu and o.weight_copies and not o.training
    counts = o.eager and (on_cpu or machine_for(o.device) is not class_of(o.device))  # rates of GPUs were read only
    return PlanPrecision(
        o.lists, o.dtype, o.accuracy, o.keep_fp32, o.keep_outputs, o.planner, o.leaves, o.measured, keeps_weights,
        counts, o.in_step,
    )  # fmt: skip


def _recompute(o: PipelineOptions) -> Pass:
    fewest = 0 if o.recompute == "all" else fewest_computed_again(o.planned_for, o.in_step)
    return RecomputeActivations(thorough=o.recompute != "some", sparing=o.recompute == "most", fewest=fewest)


def _gradient_memory(o: PipelineOptions) -> Pass:
    return KeepGradientMemory(user=o.user) if o.copies is None else KeepGradientMemory(o.copies.gradients)


def _copies(options: PipelineOptions) -> WeightCopies:
    assert options.copies is not None, "the phase has copies"
    return options.copies


TABLE = checked((
    Row(IdentifyOps, Stage.GRAPH, BIT_EXACT, skippable=False),
    Row(DropEmpty, RECOGNIZE, BIT_EXACT, needs=OURS),
    Row(DropDropout, RECOGNIZE, BIT_EXACT, needs=OURS),
    Row(EinsumsAsProducts, RECOGNIZE, ROUNDING_EQUAL, lambda o: EinsumsAsProducts(o.lists), needs=OURS,
        before=("products-as-linears", "fuse-attention")),
    Row(ProductsAsLinears, RECOGNIZE, BIT_EXACT, lambda o: ProductsAsLinears(o.lists), needs=OURS),
    Row(FuseGelu, RECOGNIZE, approximate("rounds once, where the formula rounds after each operation"), needs=OURS),
    Row(FuseRmsNorm, RECOGNIZE, approximate("bit-exact in fp32; else fp32 inside, rounded once"), needs=OURS),
    Row(ConvAsLinear, RECOGNIZE, ROUNDING_EQUAL, lambda o: ConvAsLinear(_folds(o)), needs=OURS),
    Row(FuseAttention, RECOGNIZE, approximate("scores stay fp32, where the formula rounds them"),
        lambda o: FuseAttention(o.lists, o.dtype, o.planned_for, o.keep_fp32), needs=OURS,
        joins=("attention",)),  # without which torch's kernel takes longer than the formula
    Row(FoldMasks, RECOGNIZE, ROUNDING_EQUAL, needs=OURS, after=("fuse-attention",)),
    Row(ExpandComposites, PRECISION, BIT_EXACT, lambda o: ExpandComposites(o.lists), skippable=False),
    Row(PlanPrecision, PRECISION, BIT_EXACT, _plan, after=("expand-composites",), skippable=False),
    Row(InsertCasts, CASTS, approximate("the rounding of the low dtype, where the plan lowers a value"),
        lambda o: InsertCasts(o.dtype, o.keep_outputs), after=("plan-precision",), skippable=False),
    Row(EliminateCasts, CASTS, BIT_EXACT),
    Row(OwnProducts, BACKEND, ROUNDING_EQUAL, devices=CPU, needs=OURS, before=("share-casts",)),
    Row(ShareCasts, CASTS, ROUNDING_EQUAL, after=("eliminate-casts",)),
    Row(ProtectNorms, CASTS, approximate("the parameters' gradients are closer to the exact ones"), devices=CPU),
    Row(CustomActivations, BACKEND, BIT_EXACT, devices=CPU, needs=RUNS),
    Row(Attention, BACKEND, ROUNDING_EQUAL, devices=CPU, needs=OURS, after=("fuse-attention", "fold-masks")),
    Row(GruState, BACKEND, approximate("the state is fp32 between steps, where torch's kernel rounds it"), devices=CPU,
        needs=OURS, skippable=False),
    Row(LstmBackward, BACKEND, approximate("gates and cells are fp32, where oneDNN rounds more often"), devices=CPU,
        needs=OURS),
    Row(CudnnRecurrent, BACKEND, BIT_EXACT, devices=CUDA, needs=OURS),
    Row(ContiguousLinear, LAYOUT, ROUNDING_EQUAL, needs=OURS),
    Row(ReduceFromLow, BACKEND, ROUNDING_EQUAL, lambda o: ReduceFromLow(o.planned_for), devices=CUDA, needs=OURS),
    Row(ChannelsLast, LAYOUT, ROUNDING_EQUAL, needs=OURS, before=(
        "pointwise-conv", "convolution", "conv-transpose", "depthwise", "global-pool", "fuse-group-norm",
        "align-shapes", "fuse-batch-norm")),
    Row(PointwiseConv, BACKEND, ROUNDING_EQUAL, lambda o: PointwiseConv(_folds(o)), devices=CPU,
        needs=(OPAQUE, EAGER_OR_STEP), before=("convolution",)),
    Row(Convolution, BACKEND, ROUNDING_EQUAL, devices=CPU, needs=OURS),
    Row(ConvTranspose, BACKEND, ROUNDING_EQUAL, devices=CPU, needs=OURS),
    Row(Depthwise, BACKEND, ROUNDING_EQUAL, devices=CPU, needs=OURS),
    Row(Conv1d, BACKEND, ROUNDING_EQUAL, devices=CPU, needs=RUNS, after=("depthwise",)),
    Row(GlobalPool, LAYOUT, BIT_EXACT, devices=CPU, needs=OURS),
    Row(FuseGroupNorm, BACKEND, ROUNDING_EQUAL, devices=CPU, needs=OURS),
    Row(AlignShapes, BACKEND, ROUNDING_EQUAL, lambda o: AlignShapes(o.planned_for), devices=CUDA, needs=OURS),
    Row(FuseBatchNorm, BACKEND, ROUNDING_EQUAL, devices=CPU, needs=(OPAQUE, EAGER_OR_STEP),
        before=("recompute-activations",)),
    Row(LinearCrossEntropy, BACKEND, ROUNDING_EQUAL, devices=CPU, needs=RUNS),
    Row(FuseNorm, BACKEND, approximate("at most a last place from torch's fp32 norm and its cast"), devices=CPU,
        needs=RUNS, after=("protect-norms",), before=("recompute-activations",)),
    Row(FuseDropout, BACKEND, BIT_EXACT, devices=CPU, needs=RUNS),
    Row(TableActivations, BACKEND, ROUNDING_EQUAL, devices=CPU, needs=RUNS, before=("recompute-activations",)),
    Row(RecomputeActivations, MEMORY, BIT_EXACT, _recompute, needs=RUNS, before=("small-linears", "train-linears")),
    Row(GroupedProducts, BACKEND, ROUNDING_EQUAL, devices=CPU, needs=RUNS),
    Row(SmallLinears, BACKEND, ROUNDING_EQUAL, devices=CPU, needs=RUNS, before=("train-linears",)),
    Row(TrainLinears, BACKEND, ROUNDING_EQUAL, lambda o: TrainLinears(o.in_step), devices=CPU, needs=RUNS),
    Row(CountBatches, BACKEND, BIT_EXACT, lambda o: CountBatches(o.planned_for), devices=CUDA, needs=RUNS),
    Row(CastParts, LAYOUT, BIT_EXACT, devices=CPU, needs=RUNS),
    Row(WidenLarge, MEMORY, BIT_EXACT, devices=CPU, needs=RUNS,
        after=("cast-parts", "linear-cross-entropy", "fuse-norm")),
    # Weights whose copies outlive the call.
    Row(KeepWeightCopies, WEIGHTS, BIT_EXACT, lambda o: KeepWeightCopies(_copies(o)), COPIES, CPU, skippable=False),
    Row(GroupWeightCasts, WEIGHTS, BIT_EXACT, lambda o: GroupWeightCasts(_copies(o), o.device), COPIES, CUDA,
        after=("keep-weight-copies",)),
    Row(KeepGradientMemory, MEMORY, ROUNDING_EQUAL, _gradient_memory, (*COPIES, *COMPILED), CPU, TRAINS),
    Row(LinearsOfParameters, BACKEND, BIT_EXACT, lambda o: LinearsOfParameters(_copies(o)), COPIES, CPU, TRAINS,
        after=("keep-weight-copies", "small-linears")),
    Row(FoldNorms, BACKEND, approximate("no more roundings, of other values"), lambda o: FoldNorms(_copies(o)), COPIES,
        CPU, INFERS, after=("keep-weight-copies",)),
    Row(PackWeights, BACKEND, ROUNDING_EQUAL, lambda o: PackWeights(_copies(o)), COPIES, CPU, INFERS,
        after=("keep-weight-copies", "fold-norms")),
    Row(LookAtValues, BACKEND, BIT_EXACT, lambda o: LookAtValues(_copies(o)), COPIES, CPU, INFERS,
        after=("fold-norms", "pack-weights")),
    Row(KeepLargeResults, MEMORY, BIT_EXACT, lambda o: KeepLargeResults(_copies(o).results), COPIES, CPU,
        (*INFERS, KEEP_MEMORY), after=("widen-large",)),
    Row(WidenProducts, BACKEND, ROUNDING_EQUAL, lambda o: WidenProducts(_copies(o)), COPIES, CPU,
        (*INFERS, KEEP_MEMORY), after=("pack-weights", "keep-large-results")),
    Row(KeepRecurrent, BACKEND, ROUNDING_EQUAL, phases=HANDOVER),
    # Flat graphs: those inside Inductor, and those of whole steps.
    Row(FuseBias, BACKEND, ROUNDING_EQUAL, phases=(*INDUCTOR, *STEP), devices=CPU, needs=OURS),
    Row(AmxProducts, BACKEND, ROUNDING_EQUAL, phases=(*INDUCTOR, *STEP), devices=CPU, needs=OURS, after=("fuse-bias",)),
    Row(SmallProducts, BACKEND, ROUNDING_EQUAL, phases=INDUCTOR, devices=CPU, needs=OURS, after=("fuse-bias",)),
    Row(LayGradients, BACKEND, BIT_EXACT, phases=INDUCTOR, devices=CPU, needs=OURS),
    Row(AccumulateInPlace, MEMORY, approximate("a product is added before it is rounded: one rounding less"),
        phases=STEP, needs=OURS),
    Row(OverwriteLogits, BACKEND, BIT_EXACT, phases=STEP, devices=CPU, needs=OURS),
))  # fmt: skip
