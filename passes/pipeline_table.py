"""The table of all passes, in the order in which they run: a row a pass; and which of them run over a graph.

Before: ``Policy.parse("bf16").pipeline_options("cpu")``. After: ``pipeline(Phase.CAPTURED, options)``, which is
``[IdentifyOps(), ..., PlanPrecision(...), ...]``. ``passes_named(["fuse_gelu", "backend"])`` is what
``skip=fuse-gelu|backend`` leaves out.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from amp_graph.passes.backends.cpu.attention.lower_attention import Attention
from amp_graph.passes.backends.cpu.convolution.depthwise_conv_gradients import Depthwise
from amp_graph.passes.backends.cpu.convolution.lower_pointwise_conv import LowerPointwiseConv
from amp_graph.passes.backends.cpu.inference.fold_batch_norms import FoldBatchNorms
from amp_graph.passes.backends.cpu.inference.prepack_weights import PrepackWeights
from amp_graph.passes.backends.cpu.linear.lower_linears import LowerLinears
from amp_graph.passes.backends.cpu.linear.lower_weight_gradients import LowerWeightGradients
from amp_graph.passes.backends.cpu.loss.fuse_cross_entropy import FuseCrossEntropy
from amp_graph.passes.backends.cpu.loss.logits_gradient_in_place import LogitsGradientInPlace
from amp_graph.passes.backends.cpu.norm.fuse_batch_norm_relu import FuseBatchNormRelu
from amp_graph.passes.backends.cuda.pad_shapes import PadChannels, PadShapes
from amp_graph.passes.backends.recurrent.lower_rnn import CudnnRnn, GruState, LowerRnn, LstmBackward
from amp_graph.passes.base import Pass
from amp_graph.passes.casts.eliminate_casts import EliminateCasts
from amp_graph.passes.casts.insert_casts import InsertCasts
from amp_graph.passes.casts.low_layer_norm import Fp32NormGradients
from amp_graph.passes.casts.portable_ops import CheckPortable, UsePortableOps
from amp_graph.passes.casts.share_casts import ShareCasts
from amp_graph.passes.casts.uniform_operands import UniformOperands
from amp_graph.passes.casts.widen_halves import WidenHalves
from amp_graph.passes.emulation.emulate_cuda import EmulateCuda
from amp_graph.passes.graph.identify_ops import IdentifyOps
from amp_graph.passes.layout.channels_last import ChannelsLast
from amp_graph.passes.layout.contiguous_linear_input import ContiguousLinearInput
from amp_graph.passes.layout.global_avg_pool_gradient import GlobalAvgPoolGradient
from amp_graph.passes.memory.max_pool import MaxPoolByHalves
from amp_graph.passes.memory.recompute_activations import RecomputeActivations
from amp_graph.passes.memory.reuse_embedding_gradients import ReuseEmbeddingGradients
from amp_graph.passes.pipeline_options import PipelineOptions
from amp_graph.passes.pipeline_row import (
    BIT_EXACT,
    EAGER,
    EAGER_OR_STEP,
    EMULATES,
    FROZEN,
    NOT_EMULATING,
    NOT_PORTABLE,
    OPAQUE,
    PADS_MATMULS,
    PORTABLE,
    ROUNDING_EQUAL,
    SUMS,
    TRAINING,
    Phase,
    Row,
    Stage,
    approximate,
)
from amp_graph.passes.precision.decompose_composites import DecomposeComposites
from amp_graph.passes.precision.plan_precision import PlanPrecision
from amp_graph.passes.recognize.attention import FuseAttention
from amp_graph.passes.recognize.conv_to_linear import ConvToLinear
from amp_graph.passes.recognize.einsum_to_matmul import EinsumToMatmul
from amp_graph.passes.recognize.gelu import FuseGelu
from amp_graph.passes.recognize.no_op_dropout import RemoveNoOpDropout
from amp_graph.passes.recognize.rms_norm import FuseRmsNorm
from amp_graph.passes.step.row_gradients import RowGradients
from amp_graph.passes.weights.batch_weight_casts import BatchWeightCasts
from amp_graph.passes.weights.frozen_weights import FreezeWeights

CPU, CUDA = ("cpu",), ("cuda",)
RECOGNIZE, PRECISION, CASTS, LAYOUT = Stage.RECOGNIZE, Stage.PRECISION, Stage.CASTS, Stage.LAYOUT
MEMORY, WEIGHTS, BACKEND = Stage.MEMORY, Stage.WEIGHTS, Stage.BACKEND
CALLS, COMPILED, HANDOVER, INDUCTOR, STEP = (
    (Phase.CALLS,), (Phase.COMPILED,), (Phase.HANDOVER,), (Phase.INDUCTOR,), (Phase.STEP,)
)  # fmt: skip
# Lists that reproduce torch.autocast run what the user wrote, operation by operation: conditions without OPAQUE are of
# passes that make the plan and its casts, and no more.
OURS, RUNS, TRAINS, FREEZES = (OPAQUE,), (OPAQUE, EAGER), (OPAQUE, TRAINING), (OPAQUE, FROZEN)


TABLE = (
    Row(IdentifyOps, Stage.GRAPH, BIT_EXACT, skippable=False),
    Row(WidenHalves, Stage.GRAPH, BIT_EXACT, skippable=False),
    Row(RemoveNoOpDropout, RECOGNIZE, BIT_EXACT, skippable=False,
        worth="exactness: a value read before and after a write through the dropout, which is 1.0 off without it"),
    Row(EinsumToMatmul, RECOGNIZE, ROUNDING_EQUAL, needs=OURS,
        worth="exactness: attention written with einsums has 1.9 times the error in bf16"),
    Row(FuseGelu, RECOGNIZE, approximate("rounds once, where the formula rounds after each operation"), needs=OURS,
        worth="exactness: the formula has 1.4 times the error in bf16"),
    Row(FuseRmsNorm, RECOGNIZE, approximate("bit-exact in fp32; else fp32 inside, rounded once"), needs=OURS,
        worth="exactness: the formula has 1.8 times the error in bf16"),
    Row(ConvToLinear, RECOGNIZE, ROUNDING_EQUAL, needs=OURS),
    Row(FuseAttention, RECOGNIZE, approximate("scores stay fp32, where the formula rounds them"), needs=OURS,
        joins=("attention",),  # without which torch's kernel takes longer than the formula
        worth="exactness: the formula has 1.9 times the error in bf16"),
    Row(DecomposeComposites, PRECISION, approximate("a mask is added to scores after their product"), skippable=False),
    Row(PlanPrecision, PRECISION, BIT_EXACT, skippable=False),
    Row(InsertCasts, CASTS, approximate("the rounding of the low dtype, where the plan lowers a value"),
        skippable=False),
    Row(EliminateCasts, CASTS, BIT_EXACT,
        worth="capability: casts that the user's own code makes twice, or back and forth"),
    Row(ShareCasts, CASTS, ROUNDING_EQUAL, needs=(SUMS,),
        worth="exactness: 2e-10 instead of 2e-3 in a sum of three gradients"),
    Row(Fp32NormGradients, CASTS, approximate("the parameters' gradients are closer to the exact ones"), devices=CPU,
        needs=(NOT_PORTABLE, NOT_EMULATING),
        worth="exactness: 1e-7 instead of 5e-2 in the gradients of the weight and bias of a norm"),
    Row(Attention, BACKEND, ROUNDING_EQUAL, devices=CPU, needs=OURS),
    Row(GruState, BACKEND, approximate("the state is fp32 between steps, where torch's kernel rounds it"), devices=CPU,
        needs=OURS, skippable=False),
    Row(LstmBackward, BACKEND, approximate("gates and cells are fp32, where oneDNN rounds more often"), devices=CPU,
        needs=OURS),
    Row(CudnnRnn, BACKEND, BIT_EXACT, devices=CUDA, needs=OURS,
        worth="not measured: CUDA"),
    Row(ContiguousLinearInput, LAYOUT, ROUNDING_EQUAL, needs=OURS),
    Row(ChannelsLast, LAYOUT, ROUNDING_EQUAL, needs=OURS),
    Row(LowerPointwiseConv, BACKEND, ROUNDING_EQUAL, devices=CPU,
        needs=(OPAQUE, EAGER_OR_STEP)),
    Row(Depthwise, BACKEND, ROUNDING_EQUAL, devices=CPU, needs=OURS),
    Row(GlobalAvgPoolGradient, LAYOUT, BIT_EXACT, needs=OURS),
    Row(PadShapes, BACKEND, ROUNDING_EQUAL, devices=CUDA,
        needs=(OPAQUE, PADS_MATMULS),
        worth="capability: sizes of multiples of 8"),
    Row(PadChannels, BACKEND, ROUNDING_EQUAL, devices=CUDA, needs=OURS,
        joins=("pad-shapes",),
        worth="capability: 3 channels to 4"),  # once one pass
    Row(FuseBatchNormRelu, BACKEND, ROUNDING_EQUAL, devices=CPU, needs=(OPAQUE, EAGER_OR_STEP),
        worth="capability: norm with activation, and with add and activation"),
    Row(FuseCrossEntropy, BACKEND, ROUNDING_EQUAL, needs=RUNS),
    Row(MaxPoolByHalves, MEMORY, approximate("a zero may have the other sign"), devices=CPU, needs=RUNS),
    Row(RecomputeActivations, MEMORY, BIT_EXACT, needs=RUNS),
    Row(LowerLinears, BACKEND, ROUNDING_EQUAL, devices=CPU, needs=RUNS),
    Row(EmulateCuda, Stage.EMULATION, approximate("sums in fp32, rounded once, where the CPU's kernel may round more"),
        devices=CPU, needs=(EMULATES, NOT_PORTABLE), skippable=False,
        worth="emulate=cuda: what a GPU would compute, without one"),
    # Graphs that other programs load.
    Row(UsePortableOps, CASTS, BIT_EXACT, needs=(PORTABLE,), skippable=False),
    Row(UniformOperands, CASTS, ROUNDING_EQUAL, needs=(PORTABLE,), skippable=False),
    Row(CheckPortable, CASTS, BIT_EXACT, needs=(PORTABLE,), skippable=False),
    # Graphs that run eagerly in calls of a model; a training step casts its weights inside.
    Row(FreezeWeights, WEIGHTS, BIT_EXACT, CALLS, needs=(FROZEN,),
        skippable=False),
    Row(BatchWeightCasts, WEIGHTS, BIT_EXACT, CALLS, CUDA,
        worth="not measured: CUDA"),
    Row(ReuseEmbeddingGradients, MEMORY, ROUNDING_EQUAL, (*CALLS, *COMPILED), CPU, TRAINS),
    Row(FoldBatchNorms, BACKEND, approximate("no more roundings, of other values"), CALLS, CPU, FREEZES),
    Row(PrepackWeights, BACKEND, ROUNDING_EQUAL, CALLS, CPU, FREEZES),
    Row(LowerRnn, BACKEND, ROUNDING_EQUAL, phases=HANDOVER,
        worth="capability: Inductor does not compile an LSTM of 64 steps within ten minutes"),
    # Flat graphs: those inside Inductor, and those of steps.
    Row(LowerWeightGradients, BACKEND, ROUNDING_EQUAL, phases=(*INDUCTOR, *STEP), devices=CPU, needs=OURS,
        worth="not measured: AMX"),
    Row(LogitsGradientInPlace, BACKEND, BIT_EXACT, phases=STEP, needs=OURS),
    Row(RowGradients, MEMORY, ROUNDING_EQUAL, phases=STEP, devices=CPU, needs=OURS),
)  # fmt: skip


def pipeline(phase: Phase, options: PipelineOptions) -> list[Pass]:
    """Return the passes of ``phase``, in order, built from ``options``."""
    return [row.built(options) for row in TABLE if phase in row.phases and not why_off(row, options)]


def why_off(row: Row, options: PipelineOptions) -> str:
    """Return why a pipeline of a phase of ``row`` does not contain its pass; "" if it does."""
    for name in (row.name, *row.joins):
        if name in options.skip:
            return f"skip={options.skip[name]} in the policy"
    return next((need.otherwise for need in row.conditions if not need.holds(options)), "")


# -- the words of skip=: names of passes and groups of passes -----------------------------------------


# The passes that a policy may skip; the others make the plan and its casts, or have their own option.
SKIPPABLE = tuple(sorted(row.word for row in TABLE if row.skippable))
# All skippable passes of a stage. "backend" is every backend pass, including those without their own word.
GROUPS = {
    stage.value: found
    for stage in Stage
    if (found := tuple(r.name for r in TABLE if r.stage is stage and (r.skippable or r.backend)))
}


def is_legal(word: str) -> bool:
    """Say whether ``skip=`` accepts ``word``, a name with underscores."""
    return word in SKIPPABLE or word in GROUPS


def is_pass(word: str) -> bool:
    """Say whether ``word``, a name with underscores, names a pass of the table, optional or not."""
    return any(row.word == word for row in TABLE)


def nearest(word: str) -> list[str]:
    """Return the legal words closest to ``word``."""
    return difflib.get_close_matches(word.replace("-", "_"), (*SKIPPABLE, *GROUPS), 3, 0.5)


def passes_named(words: Iterable[str]) -> dict[str, str]:
    """Return the names of the passes that ``words`` skip, each with the word that names it."""
    found: dict[str, str] = {}
    for word in words:
        for name in GROUPS.get(word, (word.replace("_", "-"),)):
            found.setdefault(name, word)
    return found
