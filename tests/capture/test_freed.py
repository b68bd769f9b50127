"""A converted model, a reverted conversion and a training step are freed once nobody has them.

Tensors and graphs are not asked for: what pytest captures of Dynamo's log holds some.
"""

import gc
import weakref

import pytest
import torch

import amp_graph
from amp_graph.capture.conversion import conversion_of
from amp_graph.passes.memory import reuse_embedding_gradients
from amp_graph.passes.memory.gradient_buffers import POOL
from tests.step.test_train_step import batches, build, with_step

((X, Y),) = batches(1)


def freed(*references):
    gc.collect()
    return [reference() is None for reference in references]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("policy", ["bf16", "bf16-O2"])
def test_a_converted_model_is_freed(policy):
    model, _ = build()
    amp_graph.convert(model, policy)(X).sum().backward()
    known = weakref.ref(model), weakref.ref(conversion_of(model))
    assert freed(*known) == [False, False]  # control
    del model
    assert freed(*known) == [True, True]


def test_copies_and_memory_are_given_back_with_the_model(monkeypatch):
    monkeypatch.setattr(reuse_embedding_gradients, "LEAST_TABLES", 0)
    model = amp_graph.convert(torch.nn.Sequential(torch.nn.Embedding(4096, 8), torch.nn.Linear(8, 4)))
    for _ in range(2):
        model(torch.arange(6)).sum().backward()
    with torch.no_grad():
        amp_graph.freeze(model)(torch.arange(6))
    frozen = conversion_of(model).captured.frozen
    assert frozen.tensors  # control
    assert POOL.tensors
    del model
    gc.collect()
    assert not frozen.tensors
    assert not POOL.tensors


def test_what_a_reverted_model_had_is_freed():
    model, _ = build()
    amp_graph.convert(model)(X).sum().backward()
    known = weakref.ref(conversion_of(model))
    amp_graph.revert(model)
    assert freed(known) == [True]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.RMSprop], ids=["inside", "outside"])
@pytest.mark.parametrize("policy", ["bf16", "bf16-O2"])
def test_a_training_step_is_freed_with_its_optimizer(kind, policy):
    model, optimizer, step = with_step(build(optimizer=kind), policy)
    step(X, Y)
    known = [weakref.ref(thing) for thing in (step, optimizer)]
    del step, optimizer
    assert all(freed(*known))
    assert model(X).isfinite().all()
