"""How a step calls the model: what stands for one argument, and what for several."""

import collections

from amp_graph.step.step_arguments import call_model

Pair = collections.namedtuple("Pair", "a b")


def test_one_dict_or_tuple_is_the_models_arguments_and_several_are_as_they_are():
    def model(*args, **kwargs):
        return args, kwargs

    assert call_model(model, {"x": 1, "y": 2}) == ((), {"x": 1, "y": 2})
    assert call_model(model, (1, 2)) == ((1, 2), {})
    assert call_model(model, [1, 2]) == ((1, 2), {})
    assert call_model(model, Pair(1, 2)) == ((1, 2), {})
    assert call_model(model, 1) == ((1,), {})
    assert call_model(model, {"x": 1}, {"y": 2}) == (({"x": 1}, {"y": 2}), {})
    assert call_model(model, (1, 2), 3) == (((1, 2), 3), {})
    assert call_model(model) == ((), {})
