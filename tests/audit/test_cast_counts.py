"""Casts that are counted: what is one value, what is not, and that nothing is kept alive to tell."""

import weakref

import pytest
import torch
from torch import nn

from amp_graph.audit.session import Audit
from amp_graph.passes.torch_compat.storage import StorageWeakRef, storage_of

LOW = torch.bfloat16


def codes_of(work, module=None):
    """Run ``work`` in a looked-at step, between two that are not; return the codes of casts that were found."""
    module = nn.Linear(4, 4) if module is None else module
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    with Audit(looks=(2,)) as audit:
        for step in range(3):
            if step == 1:
                work(module)
            optimizer.step()
    report = audit.report()
    assert not report.unseen
    return {f.code for f in report.findings if f.code.startswith("AMP7")}


def twice_the_same(module):
    x = torch.randn(1000)
    x.to(LOW), x.to(LOW)


def twice_by_a_view(module):
    x = torch.randn(10, 100)
    x.to(LOW), x.view(10, 100).to(LOW)


def written_between(module):
    x = torch.randn(1000)
    x.to(LOW), x.add_(1).to(LOW)


def in_the_same_memory(module):
    for _ in range(20):
        torch.randn(1000).to(LOW)


def parts_of_one_memory(module):
    x = torch.randn(10, 100)
    for row in x:
        row.to(LOW)


def to_two_dtypes(module):
    x = torch.randn(1000)
    x.to(LOW), x.to(torch.float16)


@pytest.mark.parametrize(
    ("work", "is_again"),
    [
        (twice_the_same, True),
        (twice_by_a_view, True),
        (written_between, False),
        (in_the_same_memory, False),
        (parts_of_one_memory, False),
        (to_two_dtypes, False),
    ],
)
def test_a_value_is_its_memory_its_version_and_its_layout(work, is_again):
    assert ("AMP702" in codes_of(work)) == is_again


def there_and_back(module):
    x = torch.randn(1000).to(LOW)
    x.float().to(LOW)


def there_written_and_back(module):
    x = torch.randn(1000).to(LOW)
    x.float().mul_(2).to(LOW)


def there_computed_and_back(module):
    x = torch.randn(1000).to(LOW)
    x.float().exp().to(LOW)


def back_to_another_dtype(module):
    x = torch.randn(1000).to(LOW)
    x.float().to(torch.float16)


@pytest.mark.parametrize(
    ("work", "is_undone"),
    [
        (there_and_back, True),
        (there_written_and_back, False),
        (there_computed_and_back, False),
        (back_to_another_dtype, False),
    ],
)
def test_a_round_trip_ends_where_it_began_and_nothing_ran_between(work, is_undone):
    assert ("AMP703" in codes_of(work)) == is_undone


def test_weights_are_cast_once_in_a_region_and_again_in_the_next():
    def once(module):
        with torch.autocast("cpu", LOW):
            module(torch.ones(2, 4)), module(torch.ones(2, 4))

    def in_two_regions(module):
        for _ in range(2):
            with torch.autocast("cpu", LOW):
                module(torch.ones(2, 4))

    def with_a_backward_between(module):
        for _ in range(2):
            with torch.autocast("cpu", LOW):
                module(torch.ones(2, 4)).sum().backward()

    def recomputed(module):
        with torch.autocast("cpu", LOW):
            y = torch.utils.checkpoint.checkpoint(module, torch.ones(2, 4), use_reentrant=False)
        y.sum().backward()

    assert codes_of(once) == set()
    assert codes_of(in_two_regions) == {"AMP701"}
    assert codes_of(with_a_backward_between) == {"AMP705"}
    assert codes_of(recomputed) == set()


@pytest.mark.parametrize(("width", "levels"), [(4, ["warning"]), (256, ["note"]), (1024, [])])
def test_casts_are_a_warning_only_where_they_are_a_large_part_and_not_told_where_they_are_a_small_one(width, levels):
    model = nn.Linear(width, width)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Audit() as audit:
        for _ in range(3):
            x = torch.randn(4096).to(LOW)
            x.float().to(LOW)
            model(torch.randn(64, width)).sum().backward()
            optimizer.step()
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
