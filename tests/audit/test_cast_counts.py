"""Casts that are counted: what is one value, what is not, and that nothing is kept alive to tell."""

import weakref

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from amp_graph.audit.session import Audit
from amp_graph.passes.torch_compat.storage import StorageWeakRef, storage_of
from tests.audit.running import trained

LOW = torch.bfloat16


def codes_of(work):
    """Run ``work`` in a looked-at step, between two that are not; return the codes of casts that were found."""
    module = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    with Audit(looks=(2,)) as audit:
        for step in range(3):
            if step == 1:
                work(module)
            optimizer.step()
    report = audit.report()
    assert not report.unseen
    return {f.code for f in report.findings if f.code.startswith("AMP7")}


@pytest.mark.parametrize(
    ("work", "is_again"),
    [
        (lambda x: (x.to(LOW), x.to(LOW)), True),
        (lambda x: (x.to(LOW), x.view(10, 100).to(LOW)), True),
        (lambda x: (x.to(LOW), x.add_(1).to(LOW)), False),
        (lambda x: [torch.randn(1000).to(LOW).numel() for _ in range(20)], False),
        (lambda x: [row.to(LOW) for row in x], False),
        (lambda x: (x.to(LOW), x.to(torch.float16)), False),
    ],
    ids=["the same", "a view", "written between", "in the same memory", "parts of one memory", "two dtypes"],
)
def test_a_value_is_its_memory_its_version_and_its_layout(work, is_again):
    assert ("AMP702" in codes_of(lambda _: work(torch.randn(10, 100)))) == is_again


def there_and_back(module, size=1000, back=lambda x: x.to(LOW)):
    x = torch.randn(size).to(LOW)
    back(x.float())


@pytest.mark.parametrize(
    ("back", "is_undone"),
    [
        (lambda x: x.to(LOW), True),
        (lambda x: x.mul_(2).to(LOW), False),
        (lambda x: x.exp().to(LOW), False),
        (lambda x: x.to(torch.float16), False),
    ],
)
def test_a_round_trip_ends_where_it_began_and_nothing_ran_between(back, is_undone):
    assert ("AMP703" in codes_of(lambda module: there_and_back(module, back=back))) == is_undone


def called(module):
    return module(torch.ones(2, 4))


def low(function):
    """Call ``function`` in a region of its own."""
    return torch.autocast("cpu", LOW)(function)()


@pytest.mark.parametrize(
    ("work", "codes"),
    [
        (lambda m: low(lambda: (called(m), called(m))), set()),
        (lambda m: [low(lambda: called(m)) for _ in range(2)], {"AMP701"}),
        (lambda m: [low(lambda: called(m).sum().backward()) for _ in range(2)], {"AMP705"}),
        (lambda m: low(lambda: checkpoint(m, torch.ones(2, 4), use_reentrant=False)).sum().backward(), set()),
    ],
    ids=["once", "in two regions", "with a backward between", "recomputed"],
)
def test_weights_are_cast_once_in_a_region_and_again_in_the_next(work, codes):
    assert codes_of(work) == codes


@pytest.mark.parametrize(("width", "levels"), [(4, ["warning"]), (256, ["note"]), (1024, [])])
def test_casts_are_a_warning_only_where_they_are_a_large_part_and_not_told_where_they_are_a_small_one(width, levels):
    model = nn.Linear(width, width)

    def loss():
        there_and_back(model, 4096)
        return model(torch.randn(64, width)).sum()

    audit = trained(loss, model.parameters())
    assert [f.level for f in audit.report().findings if f.code == "AMP703"] == levels


def test_nothing_is_kept_alive():
    gone = []

    def work(module):
        low = module(torch.randn(100, 4)).to(LOW)
        wide = low.float()
        with torch.autocast("cpu", LOW):
            again = module(wide)
        held = [(weakref.ref(t), StorageWeakRef(storage_of(t))) for t in (low, wide, again)]
        del low, wide, again
        gone.extend(ref() is None and memory.expired() for ref, memory in held)

    codes_of(work)
    assert gone == [True] * 3
