"""Joint graphs as users make them: with ``make_fx``, by the parts of ``aot_module``, and exported."""

import torch
import torch.nn.functional as F
from torch import nn
from torch._functorch.aot_autograd import aot_export_module
from torch._functorch.partitioners import default_partition
from torch.fx.experimental.proxy_tensor import make_fx

from amp_graph.passes.loss_scaling import UpdateLossScale, joint_of
from amp_graph.passes.loss_scaling.scale_loss import COUNTS
from tests.layers import layers


@layers(lambda: dict(fc=nn.Linear(4, 3)))
def WithLoss(self, x, y):
    return (F.mse_loss(self.fc(x).float(), y),)


def batch():
    generator = torch.Generator().manual_seed(3)
    return torch.randn(2, 4, generator=generator), torch.randn(2, 3, generator=generator)


def model_with_loss():
    torch.manual_seed(0)
    return WithLoss()


def exported(model, *given):
    """The joint graph, with its signature."""
    return aot_export_module(model, given, trace_joint=True, output_loss_index=0)


def joint_of_aot_module(model, *given):
    """The joint graph that ``aot_module`` partitions: it takes (primals, tangents)."""
    from functorch.compile import aot_module, make_boxed_func

    found = []

    def partition(joint, inputs, **options):
        found.append(joint)
        return default_partition(joint, inputs, **options)

    plain = lambda graph, inputs: make_boxed_func(graph.forward)  # noqa: E731
    aot_module(model, fw_compiler=plain, bw_compiler=plain, partition_fn=partition)(*given)[0].sum().backward()
    model.zero_grad()
    return found[0]


def traced(compute, *leaves, mode="fake"):
    """Forward and backward of the loss ``compute(*leaves)``, by ``make_fx``."""

    def both(*given):
        loss = compute(*given)
        return loss, *torch.autograd.grad(loss, given)

    return make_fx(both, tracing_mode=mode)(*leaves)


def state(scale=1024.0):
    """Tensors for the inputs that ``ScaleLoss`` and ``UpdateLossScale`` add, in their order."""
    return [torch.tensor(scale), *(torch.zeros((), dtype=torch.int32) for _ in COUNTS)]


def gradients(gm, outputs):
    return {name: outputs[number] for name, number in joint_of(gm).gradients.items()}


FAST = UpdateLossScale(growth_interval=1)
