"""Loss scaling as passes over a graph of your own: forward and backward by AOTAutograd, the rest appended."""

import torch
from torch import nn
from torch._functorch.aot_autograd import aot_export_module

from amp_graph.passes.graph.graph_text import graph_text
from amp_graph.passes.loss_scaling import (
    CheckFiniteAndUnscale,
    ClipGradients,
    ScaleLoss,
    UpdateLossScale,
    joint_of,
    name_exported,
)
from amp_graph.passes.manager import run_passes


class WithLoss(nn.Module):
    """A model in fp16 and its loss, which is what AOTAutograd takes."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).half()

    def forward(self, x, y):
        """Return the loss, first of a tuple."""
        return (nn.functional.mse_loss(self.net(x.half()).float(), y),)


def main() -> tuple[float, float]:
    """Run a step whose scale is too large, and one whose scale is not; return the scale after each."""
    torch.manual_seed(0)
    model, x, y = WithLoss(), torch.randn(2, 8), 1e-4 * torch.randn(2, 4)
    gm, signature = aot_export_module(model, (x, y), trace_joint=True, output_loss_index=0)
    name_exported(gm, signature)
    options = UpdateLossScale(growth_interval=1)
    run_passes(gm, [ScaleLoss(), CheckFiniteAndUnscale(), ClipGradients(norm=1.0), options])
    print(graph_text(gm))

    scale = torch.tensor(2.0**30)
    counts = [torch.zeros((), dtype=torch.int32) for _ in range(4)]  # in the order of joint_of(gm).inputs
    found = []
    for _ in range(2):
        outputs = gm(*model.parameters(), x, y, scale, *counts)
        joint = joint_of(gm)
        gradients = {name: outputs[number] for name, number in joint.gradients.items()}
        print(f"found_inf {outputs[joint.found_inf]:g}, scale {scale:g}, {[*gradients]}")
        found.append(scale.item())
        scale.fill_(2.0**10)
    return found[0], found[1]


if __name__ == "__main__":
    main()
