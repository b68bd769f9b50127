# ruff: noqa: E501  graphs have long lines
"""Golden graphs: what each pass appends to a joint graph, as text.

To accept new texts: EXPECTTEST_ACCEPT=1 pytest tests/passes/loss_scaling/test_golden.py.
"""

import expecttest
import torch

from amp_graph.passes.graph.graph_text import graph_text
from amp_graph.passes.loss_scaling import (
    AverageOverRanks,
    CheckFiniteAndUnscale,
    ClipGradients,
    ScaleLoss,
    UpdateLossScale,
    joint_of,
    name_exported,
    name_joint,
)
from amp_graph.passes.manager import run_passes
from tests.passes.loss_scaling.joint_graphs import batch, exported, joint_of_aot_module, model_with_loss, traced


class GoldenJoint(expecttest.TestCase):
    def test_scale_loss_on_the_graph_of_aot_module(self):
        gm = joint_of_aot_module(model_with_loss(), *batch())
        name_joint(gm, {"fc.weight": 1, "fc.bias": 2})
        ScaleLoss().run(gm)
        self.assertExpectedInline(
            graph_text(gm),
            """\
%0: f32[3,4] = input primals_1
%1: f32[3] = input primals_2
%2: f32[2,4] = input primals_3
%3: f32[2,3] = input primals_4
%4: f32[] = input tangents_1
%5: f32[] = input loss scale
%6: f32[] = aten.mul.Tensor(%4, %5)
%7: f32[4,3] = aten.t.default(%0)
%8: f32[2,3] = aten.addmm.default(%1, %2, %7)
%9: f32[] = aten.mse_loss.default(%8, %3)
%10: f32[2,3] = aten.mse_loss_backward.default(%6, %8, %3, 1)
%11: f32[3,2] = aten.t.default(%10)
%12: f32[3,4] = aten.mm.default(%11, %2)
%13: f32[4,3] = aten.t.default(%12)
%14: f32[1,3] = aten.sum.dim_IntList(%10, [0], True)
%15: f32[3] = aten.view.default(%14, [3])
%16: f32[3,4] = aten.t.default(%13)
return [%9, %16, %15, None, None]""",
        )

    def test_all_on_an_exported_graph(self):
        gm, signature = exported(model_with_loss(), *batch())
        name_exported(gm, signature)
        passes = [
            ScaleLoss(micro_batches=2),
            CheckFiniteAndUnscale(),
            ClipGradients(norm=1.0, value=0.1),
            UpdateLossScale(),
        ]
        run_passes(gm, passes, checked=True, strict=True)
        self.assertExpectedInline(
            graph_text(gm),
            """\
%0: f32[3,4] = input arg0_1
%1: f32[3] = input arg1_1
%2: f32[2,4] = input arg2_1
%3: f32[2,3] = input arg3_1
%4: f32[] = input loss scale
%5: i32[] = input good steps
%6: i32[] = input hysteresis left
%7: i32[] = input skipped steps
%8: i32[] = input bad steps at the floor
%9: f32[4,3] = aten.t.default(%0)
%10: f32[2,3] = aten.addmm.default(%1, %2, %9)
%11 = aten._assert_tensor_metadata.default(%10, None, None, f32, device=device(type='cpu'), layout=torch.strided)
%12: f32[] = aten.mse_loss.default(%10, %3)
%13: f32[] = aten.ones_like.default(%12, pin_memory=False, memory_format=torch.preserve_format)
%14: f32[] = aten.div.Tensor(%13, 2)
%15: f32[] = aten.mul.Tensor(%14, %4)
%16: f32[2,3] = aten.mse_loss_backward.default(%15, %10, %3, 1)
%17: f32[3,2] = aten.t.default(%16)
%18: f32[3,4] = aten.mm.default(%17, %2)
%19: f32[4,3] = aten.t.default(%18)
%20: f32[1,3] = aten.sum.dim_IntList(%16, [0], True)
%21: f32[3] = aten.view.default(%20, [3])
%22: f32[3,4] = aten.t.default(%19)
%23: f32[] = aten.zeros_like.default(%4, pin_memory=False)
%24: f64[] = aten._to_copy.default(%4, dtype=f64)
%25: f64[] = aten.reciprocal.default(%24)
%26: f32[] = aten._to_copy.default(%25, dtype=f32)
%27 = amp_graph.check_finite_and_unscale_.default([%22, %21], %26, %23)
%28: (f32[], f32[]) = aten._foreach_norm.Scalar([%22, %21], 2.0)
%29: f32[] = getitem(%28, 0)
%30: f32[] = getitem(%28, 1)
%31: f32[2] = aten.stack.default([%29, %30])
%32: f32[] = aten.linalg_vector_norm.default(%31, 2.0)
%33: f32[] = aten.add.Tensor(%32, 1e-06)
%34: f32[] = aten.reciprocal.default(%33)
%35: f32[] = aten.mul.Tensor(%34, 1.0)
%36: f32[] = aten.clamp.default(%35, None, 1.0)
%37 = aten._foreach_mul_.Tensor([%22, %21], %36)
%38: f32[3,4] = aten.clamp_.default(%22, -0.1, 0.1)
%39: f32[3] = aten.clamp_.default(%21, -0.1, 0.1)
%40 = amp_graph.update_loss_scale_.default(%4, %5, %6, %7, %8, %23, 2.0, 0.5, 2000, 1, 6.103515625e-05, 4294967296.0)
return (%12, %22, %21, %23)""",
        )
        self.assertExpectedInline(
            str(joint_of(gm)),
            """JointGraph(loss=0, gradients={'fc.weight': 1, 'fc.bias': 2}, seed='mul', parameters={'fc.weight': 'arg0_1', 'fc.bias': 'arg1_1'}, scale='', skips={}, norm='', found_inf=3, done=('check-finite-and-unscale', 'clip-gradients'), inputs=('loss_scale', 'growth_tracker', 'hysteresis_left', 'skipped', 'stuck'))""",
        )

    def test_average_over_ranks(self):
        gm = traced(
            lambda a, b: (a @ b).square().mean(),
            torch.randn(2, 3, requires_grad=True),
            torch.randn(3, 2, requires_grad=True),
        )
        name_joint(gm, {"a": 1, "b": 2})
        run_passes(gm, [AverageOverRanks("0", 4, torch.bfloat16)], checked=True, strict=True)
        self.assertExpectedInline(
            graph_text(gm),
            """\
%0: f32[2,3] = input arg0_1
%1: f32[3,2] = input arg1_1
%2: f32[2,2] = aten.mm.default(%0, %1)
%3: f32[2,2] = aten.pow.Tensor_Scalar(%2, 2)
%4: f32[] = aten.mean.default(%3)
%5: f32[] = aten.ones_like.default(%4, pin_memory=False, memory_format=torch.preserve_format)
%6: f32[2,2] = aten.expand.default(%5, [2, 2])
%7: f32[2,2] = aten.div.Scalar(%6, 4)
%8: f32[2,2] = aten.pow.Tensor_Scalar(%2, 1.0)
%9: f32[2,2] = aten.mul.Scalar(%8, 2.0)
%10: f32[2,2] = aten.mul.Tensor(%7, %9)
%11: f32[3,2] = aten.t.default(%0)
%12: f32[3,2] = aten.mm.default(%11, %10)
%13: f32[2] = aten.new_ones.default(%12, [2], pin_memory=False)
%14: f32[6] = aten.view.default(%12, [-1])
%15: f32[2,3] = aten.t.default(%1)
%16: f32[2,3] = aten.mm.default(%10, %15)
%17: f32[6] = aten.view.default(%16, [-1])
%18: f32[14] = aten.cat.default([%14, %17, %13])
%19: f32[14] = aten.div.Tensor(%18, 4)
%20: bf16[14] = aten._to_copy.default(%19, dtype=bf16)
%21: bf16[14] = _c10d_functional.all_reduce.default(%20, 'sum', '0')
%22: bf16[14] = _c10d_functional.wait_tensor.default(%21)
%23: (bf16[6], bf16[6], bf16[2]) = aten.split_with_sizes.default(%22, [6, 6, 2])
%24: bf16[6] = getitem(%23, 0)
%25: bf16[6] = getitem(%23, 1)
%26: bf16[2] = getitem(%23, 2)
%27: bf16[3,2] = aten.view.default(%24, [3, 2])
%28: f32[3,2] = aten._to_copy.default(%27, dtype=f32)
%29: bf16[2,3] = aten.view.default(%25, [2, 3])
%30: f32[2,3] = aten._to_copy.default(%29, dtype=f32)
return (%4, %30, %28)""",
        )
