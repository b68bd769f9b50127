# ruff: noqa: E501  graphs have long lines
"""The graph of a whole step, as text: forward, backward, one check, the update, one scale update."""

import expecttest
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import amp_graph
from amp_graph.cli import main as cli
from amp_graph.passes.backends.recurrent import lstm_functions
from amp_graph.passes.base import VerifyError
from tests.layers import layers


class GoldenStep(expecttest.TestCase):
    def test_a_two_layer_mlp(self):
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
%6: f16[16,8] = input 0.weight in f16
%7: f16[16] = input 0.bias in f16
%8: f16[4,16] = input 2.weight in f16
%9: f16[4] = input 2.bias in f16
%10: f32[] = input loss scale
%11: f64[] = input learning rate
%12: i32[] = input good steps
%13: i32[] = input hysteresis left
%14: i32[] = input skipped steps
%15: i32[] = input bad steps at the floor
%16: f16[2,8] = aten._to_copy.default(%0, dtype=f16)
%17: f16[8,16] = aten.t.default(%6)
%18: f16[2,16] = aten.addmm.default(%7, %16, %17)
%19: f16[2,16] = aten.relu.default(%18)
%20: f16[2,16] = aten.detach.default(%19)
%21: f16[16,4] = aten.t.default(%8)
%22: f16[2,4] = aten.addmm.default(%9, %19, %21)
%23: f32[2,4] = aten._to_copy.default(%22, dtype=f32)
%24: f32[] = aten.mse_loss.default(%23, %5)
%25: f32[] = aten.ones_like.default(%24, pin_memory=False, memory_format=torch.preserve_format)
%26: f32[] = aten.mul.Tensor(%25, %10)
%27: f32[2,4] = aten.mse_loss_backward.default(%26, %23, %5, 1)
%28: f16[2,4] = aten._to_copy.default(%27, dtype=f16)
%29: f16[4,16] = aten.t.default(%21)
%30: f16[2,16] = aten.mm.default(%28, %29)
%31: f16[4,2] = aten.t.default(%28)
%32: f16[4,16] = aten.mm.default(%31, %19)
%33: f16[16,4] = aten.t.default(%32)
%34: f16[1,4] = aten.sum.dim_IntList(%28, [0], True)
%35: f16[4] = aten.reshape.default(%34, [4])
%36: f16[4,16] = aten.t.default(%33)
%37: f16[2,16] = aten.detach.default(%20)
%38: f16[2,16] = aten.threshold_backward.default(%30, %37, 0)
%39: f16[16,2] = aten.t.default(%38)
%40: f16[16,8] = aten.mm.default(%39, %16)
%41: f16[8,16] = aten.t.default(%40)
%42: f16[1,16] = aten.sum.dim_IntList(%38, [0], True)
%43: f16[16] = aten.reshape.default(%42, [16])
%44: f16[16,8] = aten.t.default(%41)
%45: f32[] = aten.detach.default(%24)
%46: f32[16,8] = aten.empty_like.default(%44, dtype=f32, pin_memory=False)
%47: f32[16] = aten.empty_like.default(%43, dtype=f32, pin_memory=False)
%48: f32[4,16] = aten.empty_like.default(%36, dtype=f32, pin_memory=False)
%49: f32[4] = aten.empty_like.default(%35, dtype=f32, pin_memory=False)
%50 = aten._foreach_copy_.default([%46, %47, %48, %49], [%44, %43, %36, %35])
%51: f32[] = aten.zeros_like.default(%10, pin_memory=False)
%52: f64[] = aten._to_copy.default(%10, dtype=f64)
%53: f64[] = aten.reciprocal.default(%52)
%54: f32[] = aten._to_copy.default(%53, dtype=f32)
%55 = amp_graph.check_finite_and_unscale_.default([%46, %47, %48, %49], %54, %51)
%56 = aten._fused_sgd_.tensor_lr([%1, %2, %3, %4], [%46, %47, %48, %49], [], weight_decay=0.0, momentum=0.0, lr=%11, dampening=0.0, nesterov=False, maximize=False, is_first_step=False, found_inf=%51)
%57 = amp_graph.update_loss_scale_.default(%10, %12, %13, %14, %15, %51, 2.0, 0.5, 2000, 1, 6.103515625e-05, 4294967296.0)
%58 = aten._foreach_copy_.default([%6, %7, %8, %9], [%1, %2, %3, %4])
return (%45,)""",
        )


def test_dump_shows_the_step_of_a_gpt(tmp_path, capsys):
    build = tmp_path / "gpt.py"
    build.write_text(
        "import torch\nfrom transformers import GPT2Config, GPT2LMHeadModel\n"
        "def build():\n"
        "    ids = torch.zeros(2, 8, dtype=torch.long)\n"
        "    sizes = dict(vocab_size=50, n_embd=32, n_layer=1, n_head=2, n_positions=16)\n"
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
    assert cli.main(["dump", "torch.nn:Linear", "--step", "--format", "html"]) == 1
    assert "--step needs --format text" in capsys.readouterr().err


@layers(lambda: dict(layer=nn.LSTM(8, 16), last=nn.Linear(16, 4)))
def Recurrent(self, x):
    return self.last(self.layer(x)[0][-1])


@pytest.mark.parametrize("skip", ["", ",skip=backend"])
def test_a_recurrent_layer_has_a_truthful_workspace(skip, monkeypatch):
    monkeypatch.setenv("AMP_GRAPH_VERIFY", "1")
    model = Recurrent()
    step = amp_graph.TrainStep(model, F.cross_entropy, torch.optim.SGD(model.parameters(), lr=0.1), f"bf16{skip}")
    batch = torch.randn(5, 8, 8), torch.arange(8) % 4
    losses = [step(*batch).item() for _ in range(3)]
    assert losses == sorted(losses, reverse=True)
    monkeypatch.setattr(lstm_functions, "set_value", lambda node, new: None)  # control
    other = amp_graph.TrainStep(model, F.cross_entropy, step.optimizer, f"bf16{skip}")
    if step.graph_text().count("mkldnn_rnn_layer"):
        with pytest.raises(VerifyError):
            other(*batch)
