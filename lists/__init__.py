"""Which operation may run in which precision: TOML lists with a reason for every entry."""

from amp_graph.lists.errors import AmpGraphError as AmpGraphError
from amp_graph.lists.errors import AmpGraphWarning as AmpGraphWarning
from amp_graph.lists.errors import ListError as ListError
from amp_graph.lists.errors import warn as warn
from amp_graph.lists.load import builtin_names as builtin_names
from amp_graph.lists.load import effective as effective
from amp_graph.lists.load import load as load
from amp_graph.lists.load import merge as merge
from amp_graph.lists.operators import check_op_exists as check_op_exists
from amp_graph.lists.schema import ModuleRule as ModuleRule
from amp_graph.lists.schema import OpClass as OpClass
from amp_graph.lists.schema import OpList as OpList
from amp_graph.lists.schema import Rule as Rule

__all__ = [
    "AmpGraphError",
    "AmpGraphWarning",
    "ListError",
    "ModuleRule",
    "OpClass",
    "OpList",
    "Rule",
    "builtin_names",
    "check_op_exists",
    "effective",
    "load",
    "merge",
    "warn",
]
