"""How a step calls the model: what stands for one argument, and what for several."""

import collections

import pytest

from amp_graph.step.step_arguments import call_model

Pair = collections.namedtuple("Pair", "a b")


CALLS = [
    (({"x": 1, "y": 2},), ((), {"x": 1, "y": 2})),
    (((1, 2),), ((1, 2), {})),
    (([1, 2],), ((1, 2), {})),
    ((Pair(1, 2),), ((1, 2), {})),
    ((1,), ((1,), {})),
    (({"x": 1}, {"y": 2}), (({"x": 1}, {"y": 2}), {})),
    (((1, 2), 3), (((1, 2), 3), {})),
    ((), ((), {})),
]


@pytest.mark.parametrize(("given", "called"), CALLS, ids=str)
def test_one_dict_or_tuple_is_the_models_arguments_and_several_are_as_they_are(given, called):
    assert call_model(lambda *args, **kwargs: (args, kwargs), *given) == called
