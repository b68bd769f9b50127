"""One thread is chosen where many are measured to be slower, and torch's setting stays as it was."""

import pytest
import torch

from examples.demo import threads


@pytest.mark.parametrize(("many", "one", "chosen"), [(2.0, 1.0, 1), (1.0, 2.0, 4), (1.0, 1.0, 4)])
def test_the_faster_number_is_chosen(monkeypatch, many, one, chosen):
    asked = []

    def seconds(count):
        asked.append(count)
        torch.set_num_threads(1)
        return one if count == 1 else many

    monkeypatch.setattr(threads, "_seconds", seconds)
    torch.set_num_threads(4)
    assert threads.useful_threads() == chosen
    assert torch.get_num_threads() == 4
    assert asked == [4, 1] * 5


def test_a_single_thread_is_not_measured(monkeypatch):
    monkeypatch.setattr(threads, "_seconds", None)
    torch.set_num_threads(1)
    assert threads.useful_threads() == 1


def test_what_is_measured_is_a_time_with_so_many_threads():
    assert 0 < threads._seconds(1) < 60
    assert torch.get_num_threads() == 1
