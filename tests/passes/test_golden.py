"""Golden graphs: what small models become, as text.

To accept new texts: EXPECTTEST_ACCEPT=1 pytest tests/passes/test_golden.py.
"""

import contextlib
from unittest import mock

import expecttest
import torch

from amp_graph.passes.backends.cpu.convolution import depthwise_conv_gradients, lower_pointwise_conv
from amp_graph.passes.backends.cpu.inference import fold_batch_norms
from amp_graph.passes.backends.cpu.loss import fuse_cross_entropy
from amp_graph.passes.graph import call_arguments
from amp_graph.passes.graph.graph_text import graph_text
from amp_graph.passes.layout import channels_last
from amp_graph.passes.native import gemm_thresholds
from tests.passes.golden_models import CASES
from tests.passes.graphs import body_text, capture, rewritten

ASKING = (
    depthwise_conv_gradients,
    lower_pointwise_conv,
    fold_batch_norms,
    fuse_cross_entropy,
    channels_last,
    gemm_thresholds,
    call_arguments,
)


def graph_of(name, policy="bf16", multiplies_bf16=False):
    """The rewritten graph, on a machine with or without instructions for bf16: what pays is not the same."""
    build, inputs = CASES[name]
    can = {"multiplies_bf16": multiplies_bf16, "cpu_has_bf16": multiplies_bf16, "cpu_has_amx": False}
    with contextlib.ExitStack() as machine:
        for module in ASKING:
            for known in can.keys() & vars(module).keys():
                machine.enter_context(mock.patch.object(module, known, mock.Mock(return_value=can[known])))
        machine.enter_context(torch._dynamo.config.patch(allow_rnn=True))
        return rewritten(capture(build(), *inputs()), policy)


class GoldenTest(expecttest.TestCase):
    def check(self, text, expected, skip=1):
        assert len(text.splitlines()) <= 45, "a golden graph fits on one screen"
        self.assertExpectedInline(text, expected, skip=skip)

    def test_transformer_block_autocast(self):
        self.check(
            body_text(graph_of("block")),
            """\
%13: f32[2,3,8] = layer_norm(%2, (8,), %0, %1, 1e-05)  # ln_1
%14: bf16[2,3,8] = .bfloat16(%13)  # ln_1
%15: bf16[24,8] = .bfloat16(%3)  # qkv
%16: bf16[24] = .bfloat16(%4)  # qkv
%17: bf16[2,3,24] = linear(%14, %15, %16)  # qkv
%18: (bf16[2,3,8], bf16[2,3,8], bf16[2,3,8]) = .chunk(%17, 3, -1)
%19: bf16[2,3,8] = getitem(%18, 0)
%20: bf16[2,3,8] = getitem(%18, 1)
%21: bf16[2,3,8] = getitem(%18, 2)
%22: bf16[2,3,2,4] = .view(%19, 2, 3, 2, 4)
%23: bf16[2,2,3,4] = .transpose(%22, 1, 2)
%24: bf16[2,3,2,4] = .view(%20, 2, 3, 2, 4)
%25: bf16[2,2,3,4] = .transpose(%24, 1, 2)
%26: bf16[2,3,2,4] = .view(%21, 2, 3, 2, 4)
%27: bf16[2,2,3,4] = .transpose(%26, 1, 2)
%28: bf16[2,2,4,3] = .transpose(%25, -1, -2)
%29: bf16[2,2,3,3] = matmul(%23, %28)
%30: bf16[2,2,3,3] = truediv(%29, 2.0)
%31: bf16[2,2,3,3] = .softmax(%30, -1)
%32: bf16[2,2,3,4] = matmul(%31, %27)
%33: bf16[2,3,2,4] = .transpose(%32, 1, 2)
%34: bf16[2,3,8] = .reshape(%33, 2, 3, 8)
%35: bf16[8,8] = .bfloat16(%5)  # proj
%36: bf16[8] = .bfloat16(%6)  # proj
%37: bf16[2,3,8] = linear(%34, %35, %36)  # proj
%38: f32[2,3,8] = add(%2, %37)
%39: f32[2,3,8] = layer_norm(%38, (8,), %7, %8, 1e-05)  # ln_2
%40: bf16[2,3,8] = .bfloat16(%39)  # ln_2
%41: bf16[32,8] = .bfloat16(%9)  # fc
%42: bf16[32] = .bfloat16(%10)  # fc
%43: bf16[2,3,32] = linear(%40, %41, %42)  # fc
%44: bf16[2,3,32] = gelu(%43)
%45: bf16[8,32] = .bfloat16(%11)  # out
%46: bf16[8] = .bfloat16(%12)  # out
%47: bf16[2,3,8] = linear(%44, %45, %46)  # out
%48: f32[2,3,8] = add(%38, %47)
return (%48,)""",
        )

    def test_transformer_block_fast(self):
        self.check(
            body_text(graph_of("inside", "bf16,accuracy=fast")),
            """\
%17: bf16[2,3,8] = .bfloat16(%2)  # patch
%18: bf16[8,8] = .bfloat16(%0)  # patch
%19: bf16[8] = .bfloat16(%1)  # patch
%20: bf16[2,3,8] = linear(%17, %18, %19)  # patch
%21: bf16[2,3,8] = layer_norm_low(%20, (8,), %3, %4, 1e-05)  # block.ln_1
%22: bf16[24,8] = .bfloat16(%5)  # block.qkv
%23: bf16[24] = .bfloat16(%6)  # block.qkv
%24: bf16[2,3,24] = linear(%21, %22, %23)  # block.qkv
%25: (bf16[2,3,8], bf16[2,3,8], bf16[2,3,8]) = .chunk(%24, 3, -1)  # block
%26: bf16[2,3,8] = getitem(%25, 0)  # block
%27: bf16[2,3,8] = getitem(%25, 1)  # block
%28: bf16[2,3,8] = getitem(%25, 2)  # block
%29: bf16[2,3,2,4] = .view(%26, 2, 3, 2, 4)  # block
%30: bf16[2,2,3,4] = .transpose(%29, 1, 2)  # block
%31: bf16[2,3,2,4] = .view(%27, 2, 3, 2, 4)  # block
%32: bf16[2,2,3,4] = .transpose(%31, 1, 2)  # block
%33: bf16[2,3,2,4] = .view(%28, 2, 3, 2, 4)  # block
%34: bf16[2,2,3,4] = .transpose(%33, 1, 2)  # block
%35: bf16[2,2,4,3] = .transpose(%32, -1, -2)  # block
%36: bf16[2,2,3,3] = matmul(%30, %35)  # block
%37: bf16[2,2,3,3] = truediv(%36, 2.0)  # block
%38: bf16[2,2,3,3] = .softmax(%37, -1)  # block
%39: bf16[2,2,3,4] = matmul(%38, %34)  # block
%40: bf16[2,3,2,4] = .transpose(%39, 1, 2)  # block
%41: bf16[2,3,8] = .reshape(%40, 2, 3, 8)  # block
%42: bf16[8,8] = .bfloat16(%7)  # block.proj
%43: bf16[8] = .bfloat16(%8)  # block.proj
%44: bf16[2,3,8] = linear(%41, %42, %43)  # block.proj
%45: bf16[2,3,8] = add(%20, %44)  # block
%46: bf16[2,3,8] = layer_norm_low(%45, (8,), %9, %10, 1e-05)  # block.ln_2
%47: bf16[32,8] = .bfloat16(%11)  # block.fc
%48: bf16[32] = .bfloat16(%12)  # block.fc
%49: bf16[2,3,32] = linear(%46, %47, %48)  # block.fc
%50: bf16[2,3,32] = gelu(%49)  # block
%51: bf16[8,32] = .bfloat16(%13)  # block.out
%52: bf16[8] = .bfloat16(%14)  # block.out
%53: bf16[2,3,8] = linear(%50, %51, %52)  # block.out
%54: bf16[2,3,8] = add(%45, %53)  # block
%55: bf16[8,8] = .bfloat16(%15)  # head
%56: bf16[8] = .bfloat16(%16)  # head
%57: bf16[2,3,8] = linear(%54, %55, %56)  # head
%58: f32[2,3,8] = .float(%57)
return (%58,)""",
        )

    def test_shared_casts_of_a_stream_fast(self):
        self.check(
            body_text(graph_of("stacked", "bf16,accuracy=fast")),
            """\
%6: f32[1,3,8] = embedding(%1, %0, None, None, 2.0, False, False)  # embed
%7: f32[1,3,8] = layer_norm(%6, (8,), %2, %3, 1e-05)  # ln
%8: bf16[1,3,8] = .bfloat16(%7)  # ln
%9: bf16[8,8] = .bfloat16(%4)  # fc
%10: bf16[8] = .bfloat16(%5)  # fc
%11: bf16[1,3,8] = linear(%8, %9, %10)  # fc
%12: f32[1,3,8] = add(%6, %11)
%13: (f32[1,3,8], bf16[1,3,8]) = shared_cast(%12, bf16, 1, True)
%14: f32[1,3,8] = getitem(%13, 0)
%15: bf16[1,3,8] = getitem(%13, 1)
%16: bf16[1,3,8] = layer_norm_low(%15, (8,), %2, %3, 1e-05)  # ln
%17: bf16[1,3,8] = linear(%16, %9, %10)  # fc
%18: f32[1,3,8] = add(%14, %17)
return (%18,)""",
        )

    def test_residual_block(self):
        self.check(
            body_text(graph_of("residual")),
            """\
%13: bf16[2,4,5,5] = .bfloat16(%1)  # conv1
%14: bf16[4,4,3,3] = .bfloat16(%0)  # conv1
%15: bf16[2,4,5,5] = conv2d(%13, %14, None, (1, 1), (1, 1), (1, 1), 1)  # conv1
%16: i64[] = .add_(%2, 1)  # bn1
%17: bf16[2,4,5,5] = batch_norm(%15, %3, %4, %5, %6, True, 0.1, 1e-05)  # bn1
%18: bf16[2,4,5,5] = relu(%17, inplace=True)  # relu
%19: bf16[4,4,3,3] = .bfloat16(%7)  # conv2
%20: bf16[2,4,5,5] = conv2d(%18, %19, None, (1, 1), (1, 1), (1, 1), 1)  # conv2
%21: i64[] = .add_(%8, 1)  # bn2
%22: bf16[2,4,5,5] = batch_norm(%20, %9, %10, %11, %12, True, 0.1, 1e-05)  # bn2
%23: f32[2,4,5,5] = within_range(%1, bf16)
%24: bf16[2,4,5,5] = iadd(%22, %23)
%25: bf16[2,4,5,5] = relu(%24, inplace=True)  # relu
%26: f32[2,4,5,5] = .float(%25)
return (%26,)""",
        )

    def test_residual_block_where_channels_last_pays(self):
        self.check(
            body_text(graph_of("residual", multiplies_bf16=True)),
            """\
%13: bf16[2,4,5,5] = .bfloat16(%1)  # conv1
%14: bf16[4,4,3,3] = .bfloat16(%0)  # conv1
%15: bf16[2,4,5,5] = .contiguous(%13, memory_format=torch.channels_last)  # conv1
%16: bf16[2,4,5,5] = conv2d(%15, %14, None, (1, 1), (1, 1), (1, 1), 1)  # conv1
%17: i64[] = .add_(%2, 1)  # bn1
%18: bf16[2,4,5,5] = batch_norm(%16, %3, %4, %5, %6, True, 0.1, 1e-05)  # bn1
%19: bf16[2,4,5,5] = relu(%18, inplace=True)  # relu
%20: bf16[4,4,3,3] = .bfloat16(%7)  # conv2
%21: bf16[2,4,5,5] = conv2d(%19, %20, None, (1, 1), (1, 1), (1, 1), 1)  # conv2
%22: i64[] = .add_(%8, 1)  # bn2
%23: bf16[2,4,5,5] = batch_norm(%21, %9, %10, %11, %12, True, 0.1, 1e-05)  # bn2
%24: f32[2,4,5,5] = within_range(%1, bf16)
%25: f32[2,4,5,5] = .contiguous(%24, memory_format=torch.channels_last)
%26: bf16[2,4,5,5] = iadd(%23, %25)
%27: bf16[2,4,5,5] = relu(%26, inplace=True)  # relu
%28: bf16[2,4,5,5] = .contiguous(%27, memory_format=torch.contiguous_format)  # relu
%29: f32[2,4,5,5] = .float(%28)
return (%29,)""",
        )

    def test_recurrent(self):
        self.check(
            body_text(graph_of("recurrent")),
            """\
%7: bf16[1,2,8] = zeros(1, 2, 8, dtype=bf16, device=device(type='cpu'))  # lstm
%8: bf16[1,2,8] = zeros(1, 2, 8, dtype=bf16, device=device(type='cpu'))  # lstm
%9: bf16[2,3,4] = .bfloat16(%4)  # lstm
%10: bf16[32,4] = .bfloat16(%0)  # lstm
%11: bf16[32,8] = .bfloat16(%1)  # lstm
%12: bf16[32] = .bfloat16(%2)  # lstm
%13: bf16[32] = .bfloat16(%3)  # lstm
%14: (bf16[2,3,8], bf16[1,2,8], bf16[1,2,8]) = lstm(%9, (%7, %8), [%10, %11, %12, %13], True, 1, 0.0, True, False, True)  # lstm
%15: bf16[2,3,8] = getitem(%14, 0)  # lstm
%16: bf16[2,8] = getitem(%15, (:, -1))
%17: bf16[2,8] = .bfloat16(%5)  # fc
%18: bf16[2] = .bfloat16(%6)  # fc
%19: bf16[2,2] = linear(%16, %17, %18)  # fc
%20: f32[2,2] = .float(%19)
return (%20,)""",  # noqa: E501
        )

    def test_mlp_with_its_loss_inside(self):
        self.check(
            graph_text(graph_of("with_loss")),
            """\
%0: f32[16,8] = input L_self_modules_a_parameters_weight_
%1: f32[16] = input L_self_modules_a_parameters_bias_
%2: f32[3,8] = input L_x_
%3: f32[4,16] = input L_self_modules_b_parameters_weight_
%4: f32[4] = input L_self_modules_b_parameters_bias_
%5: i64[3] = input L_y_
%6: bf16[3,8] = .bfloat16(%2)  # a
%7: bf16[16,8] = .bfloat16(%0)  # a
%8: bf16[16] = .bfloat16(%1)  # a
%9: bf16[3,16] = linear(%6, %7, %8)  # a
%10: bf16[3,16] = relu(%9)
%11: bf16[4,16] = .bfloat16(%3)  # b
%12: bf16[4] = .bfloat16(%4)  # b
%13: bf16[3,4] = linear(%10, %11, %12)  # b
%14: f32[3,4] = .float(%13)
%15: f32[] = cross_entropy(%14, %5)
return (%15,)""",
        )

    def test_mlp_with_its_loss_inside_fp16(self):
        self.check(
            body_text(graph_of("with_loss", "fp16")),
            """\
%6: f16[3,8] = .half(%2)  # a
%7: f16[16,8] = .half(%0)  # a
%8: f16[16] = .half(%1)  # a
%9: f16[3,16] = linear(%6, %7, %8)  # a
%10: f16[3,16] = relu(%9)
%11: f16[4,16] = .half(%3)  # b
%12: f16[4] = .half(%4)  # b
%13: f16[3,4] = linear(%10, %11, %12)  # b
%14: f32[3,4] = .float(%13)
%15: f32[] = cross_entropy(%14, %5)
return (%15,)""",
        )

    def test_write_to_a_view(self):
        self.check(
            body_text(graph_of("writes_to_view")),
            """\
%5: bf16[2,8] = .bfloat16(%2)  # a
%6: bf16[8,8] = .bfloat16(%0)  # a
%7: bf16[8] = .bfloat16(%1)  # a
%8: bf16[2,8] = linear(%5, %6, %7)  # a
%9: bf16[8,8] = .bfloat16(%3)  # b
%10: bf16[8] = .bfloat16(%4)  # b
%11: bf16[2,8] = linear(%8, %9, %10)  # b
%12: bf16[2,4] = getitem(%8, (:, :4))
%13: bf16[2,4] = .add_(%12, 1.0)
%14: bf16[2,8] = linear(%8, %9, %10)  # b
%15: bf16[2,8] = sub(%14, %11)
%16: f32[2,8] = .float(%15)
return (%16,)""",
        )
