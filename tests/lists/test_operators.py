"""What is told of operators that do not exist."""

import pytest
import torch

from amp_graph.lists.errors import ListError
from amp_graph.lists.operators import check_op_exists


def test_an_overload_that_does_not_exist_is_told_the_first_that_does():
    with pytest.raises(ListError, match=r'op = "aten.gelu.(default|out)"'):
        check_op_exists("aten.gelu.x")
    library = torch.library.Library("amp_single", "DEF")
    library.define("only(Tensor x) -> Tensor")  # no other overload
    assert (len(check_op_exists("amp_single.only")), len(check_op_exists("aten.linear"))) == (1, 2)
    with pytest.raises(
        ListError, match=r'no such overload(?s:.*)legal: *amp_single.only.default(?s:.*)op = "amp_single.o'
    ):
        check_op_exists("amp_single.only.x")


NO_OPERATORS = ("aten.nothing_like_this", "linear", "", "aten.__class__")


@pytest.mark.parametrize("name", ["a(b.gelu", "a b.gelu", "é.gelu", "1a.gelu", ".gelu", *NO_OPERATORS])
def test_a_name_that_no_operator_can_have_is_unknown(name):
    with pytest.raises(ListError, match=r"unknown operator(?s:.*)legal:(?s:.*)fix:"):
        check_op_exists(name)


@pytest.mark.parametrize(
    ("name", "operator"),
    [
        ("torch.special.airy_ai", "aten.special_airy_ai"),
        ("special.expit", "aten.special_expit"),
        ("torch.nn.functional.gelu", "aten.gelu"),
    ],
)
def test_a_function_as_users_call_it_is_told_its_operator(name, operator):
    with pytest.raises(ListError, match=f'unknown operator {name}(?s:.*)op = "{operator}"'):
        check_op_exists(name)
