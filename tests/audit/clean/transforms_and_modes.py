"""Calls that meet a dispatch mode in ways of their own: transforms, tracing, export, other modes, nested tensors."""

import copy

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
for step in range(3):
    x = torch.randn(5, 8)
    jacobian = torch.func.vmap(torch.func.jacrev(model))(x)
    hessian = torch.func.hessian(lambda row: model(row).sum())(x[0])
    x.requires_grad_()
    slope = torch.autograd.grad(model(x).sum(), x, create_graph=True)[0]
    branch = torch.cond(torch.tensor(step > 1), lambda a: a + 1, lambda a: a - 1, (model(x),))
    loss = branch.square().mean() + slope.square().sum() + jacobian.sum()
    loss.backward()
    checkpoint(model, x, use_reentrant=False).sum().backward()
    checkpoint(model, x, use_reentrant=True).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    ragged = torch.nested.nested_tensor([torch.randn(2, 3), torch.randn(4, 3)], layout=torch.jagged)
    sparse = torch.sparse_coo_tensor(torch.tensor([[0, 1], [1, 0]]), torch.ones(2), (2, 2))
    traced = torch.jit.trace(model, x.detach())
    with torch.device("meta"):
        nn.Linear(3, 4)
    with FakeTensorMode():
        nn.Linear(3, 4)(torch.randn(2, 3))
    with FlopCounterMode(display=False) as counter:
        copy.deepcopy(model)(x)
    with torch.inference_mode():
        print(traced(x).sum().item(), counter.get_total_flops(), sparse.to_dense().sum().item())
    print(loss.item(), hessian.norm().item(), (ragged * 2).values().sum().item())
