# ruff: noqa: E501  graphs have long lines
"""The graph of a whole step, as text: forward, backward, one check, the update, one scale update."""

import expecttest
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import amp_graph
from amp_graph import cli, step_graph


class GoldenStep(expecttest.TestCase):
    def test_a_two_layer_mlp(self):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
        step = amp_graph.TrainStep(model, F.mse_loss, torch.optim.SGD(model.parameters(), lr=0.1), "fp16")
        step(torch.randn(2, 8), torch.randn(2, 4))
        text = step.graph_text().replace(", layout=torch.strided, device=device(type='cpu')", "")
        assert len(text.splitlines()) <= 60, "a golden graph fits on one screen"
        self.assertExpectedInline(
            text,
            """\
%0: f32[2,8] = input batch.0
%1: f32[16,8] = input 0.weight
%2: f32[16] = input 0.bias
%3: f32[4,16] = input 2.weight
%4: f32[4] = input 2.bias
%5: f32[2,4] = input batch.1
%6: f32[] = input loss scale
%7: i32[] = input good steps
%8: i32[] = input hysteresis left
%9: i32[] = input skipped steps
%10: i32[] = input bad steps at the floor
%11: f64[] = input learning rate
%12: f16[16,8] = input 0.weight in f16
%13: f16[16] = input 0.bias in f16
%14: f16[4,16] = input 2.weight in f16
%15: f16[4] = input 2.bias in f16
%16: f16[2,8] = aten._to_copy.default(%0, dtype=f16)
%17: f16[8,16] = aten.t.default(%12)
%18: f16[2,16] = aten.addmm.default(%13, %16, %17)
%19: f16[2,16] = aten.relu.default(%18)
%20: f16[2,16] = aten.detach.default(%19)
%21: f16[16,4] = aten.t.default(%14)
%22: f16[2,4] = aten.addmm.default(%15, %19, %21)
%23: f32[2,4] = aten._to_copy.default(%22, dtype=f32)
%24: f32[] = aten.mse_loss.default(%23, %5)
%25: f32[] = aten.mul.Tensor(%24, %6)
%26: f32[] = aten.ones_like.default(%25, pin_memory=False, memory_format=torch.preserve_format)
%27: f32[] = aten.mul.Tensor(%26, %6)
%28: f32[2,4] = aten.mse_loss_backward.default(%27, %23, %5, 1)
%29: f16[2,4] = aten._to_copy.default(%28, dtype=f16)
%30: f16[4,16] = aten.t.default(%21)
%31: f16[2,16] = aten.mm.default(%29, %30)
%32: f16[4,2] = aten.t.default(%29)
%33: f16[4,16] = aten.mm.default(%32, %19)
%34: f16[16,4] = aten.t.default(%33)
%35: f16[1,4] = aten.sum.dim_IntList(%29, [0], True)
%36: f16[4] = aten.reshape.default(%35, [4])
%37: f16[4,16] = aten.t.default(%34)
%38: f16[2,16] = aten.detach.default(%20)
%39: f16[2,16] = aten.threshold_backward.default(%31, %38, 0)
%40: f16[16,2] = aten.t.default(%39)
%41: f16[16,8] = aten.mm.default(%40, %16)
%42: f16[8,16] = aten.t.default(%41)
%43: f16[1,16] = aten.sum.dim_IntList(%39, [0], True)
%44: f16[16] = aten.reshape.default(%43, [16])
%45: f16[16,8] = aten.t.default(%42)
%46: f32[16,8] = aten._to_copy.default(%45, dtype=f32)
%47: f32[16] = aten._to_copy.default(%44, dtype=f32)
%48: f32[4,16] = aten._to_copy.default(%37, dtype=f32)
%49: f32[4] = aten._to_copy.default(%36, dtype=f32)
%50: f32[] = aten.detach.default(%24)
%51: f32[] = aten.zeros_like.default(%6, pin_memory=False)
%52: f64[] = aten._to_copy.default(%6, dtype=f64)
%53: f64[] = aten.reciprocal.default(%52)
%54: f32[] = aten._to_copy.default(%53, dtype=f32)
%55 = amp_graph.check_finite_and_unscale_.default([%46, %47, %48, %49], %54, %51)
%56 = aten._fused_sgd_.tensor_lr([%1, %2, %3, %4], [%46, %47, %48, %49], [], weight_decay=0.0, momentum=0.0, lr=%11, dampening=0.0, nesterov=False, maximize=False, is_first_step=False, found_inf=%51)
%57 = amp_graph.update_loss_scale_.default(%6, %7, %8, %9, %10, %51, 2.0, 0.5, 2000, 1, 6.103515625e-05, 4294967296.0)
%58 = aten._foreach_copy_.default([%12, %13, %14, %15], [%1, %2, %3, %4])
return (%50,)""",
        )


def test_dump_shows_the_step_of_a_gpt(tmp_path, capsys):
    build = tmp_path / "gpt.py"
    build.write_text(
        "import torch\nfrom transformers import GPT2Config, GPT2LMHeadModel\n"
        "def build():\n"
        "    ids = torch.zeros(2, 8, dtype=torch.long)\n"
        "    sizes = dict(vocab_size=50, n_embd=32, n_layer=2, n_head=2, n_positions=16)\n"
        "    config = GPT2Config(**sizes, use_cache=False, bos_token_id=0, eos_token_id=1)\n"
        "    return GPT2LMHeadModel(config), {'input_ids': ids, 'labels': ids}\n"
    )
    assert cli.main(["dump", f"{build}:build", "--step", "--policy", "fp16"]) == 0
    out = capsys.readouterr().out
    for name in ("check_finite_and_unscale_", "update_loss_scale_", "_fused_adamw_"):
        assert out.count(f"{name}.") == 1, name
    assert out.index("addmm") < out.index("aten.mm") < out.index("check_finite") < out.index("_fused_adamw_")
    assert out.index("_fused_adamw_") < out.index("update_loss_scale_")
    assert "input transformer.h.0.attn.c_attn.weight" in out
    assert "input exp_avg of transformer.wte.weight" in out


def test_step_goes_with_text_alone(capsys):
    assert cli.main(["dump", "torch.nn:Linear", "--step", "--format", "dot"]) == 1
    assert "--step needs --format text" in capsys.readouterr().err


@pytest.mark.parametrize(
    "options", [{}, {"clip_norm": 0.1}, {"policy": "fp16"}, {"policy": "bf16-O2"}, {"micro_batches": 2}]
)
def test_gradients_that_are_widened_together_are_the_same(options, monkeypatch):
    """As on CUDA: one call for many, which is not so over micro-batches, where they are added up in fp32."""
    found, casts = [], []
    for together in (False, True):
        monkeypatch.setattr(step_graph, "widening_together_pays", lambda device, pays=together: pays)
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 24), nn.GELU(), nn.Linear(24, 24), nn.GELU(), nn.Linear(24, 3))
        given = {"policy": "bf16", "update": "torch", **options}
        step = amp_graph.TrainStep(model, F.cross_entropy, torch.optim.AdamW(model.parameters(), 0.01), **given)
        for _ in range(3):
            step(torch.randn(8, 6), torch.randint(3, (8,)))
        found.append([p.detach().clone() for p in model.parameters()])
        casts.append(step.graph_text().count("_foreach_copy"))
    assert all(map(torch.equal, *found))
    assert casts[1] == casts[0] + ("micro_batches" not in options)
