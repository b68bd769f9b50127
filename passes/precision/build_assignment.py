"""Turn a planning problem into numbers: one variable per operation, a cost for each choice and each cast.

Before: ``linear -> gelu -> linear`` with classes and shapes. After: a ``Task`` in which the gelu's variable is free.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from torch.fx import Node

from amp_graph.lists import OpClass
from amp_graph.passes.graph.fake_values import captured, is_eligible
from amp_graph.passes.graph.grad_regions import is_trained
from amp_graph.passes.graph.identify_ops import is_part
from amp_graph.passes.graph.meta_keys import WISH
from amp_graph.passes.precision.classify import Classification
from amp_graph.passes.precision.lookahead import is_leaf
from amp_graph.passes.precision.machine_rates import Machine
from amp_graph.passes.precision.op_cost import cast_picoseconds, kept_picoseconds, picoseconds, work_of
from amp_graph.passes.precision.planning_problem import FREE, LOW, Choice, Problem
from amp_graph.passes.precision.precision_assignment import FULL_ALWAYS, LOW_ALWAYS, Task, Term
from amp_graph.passes.precision.rule_based_planner import Operands, RuleBasedPlan, operands


@dataclass
class Formulation:
    """A task under construction, and what its variables stand for.

    ``of``: the variable of each operation. ``holds``: the variable that gives the precision of a node's value.
    ``tied``: operations that must have the precision of another node's value.
    """

    problem: Problem
    machine: Machine
    dtype: str
    painted: dict[Node, Choice]
    permitted: RuleBasedPlan
    of: dict[Node, int] = field(default_factory=dict)
    holds: dict[Node, int] = field(default_factory=dict)
    tied: set[Node] = field(default_factory=set)
    full: list[int] = field(default_factory=lambda: [0, 0])
    low: list[int] = field(default_factory=lambda: [0, 0])
    fixed: dict[int, bool] = field(default_factory=lambda: {FULL_ALWAYS: False, LOW_ALWAYS: True})
    limits: list[tuple[int, int]] = field(default_factory=list)
    lowers: dict[Node, list[int]] = field(default_factory=dict)
    widens: dict[Node, list[int]] = field(default_factory=dict)
    keepers: dict[Node, list[int]] = field(default_factory=dict)
    promotions: list[Term] = field(default_factory=list)

    def task(self, skip: bool = True) -> Task:
        """Return the task as numbers.

        ``skip``: an ``allow`` operation may also stay in full precision where low precision is not profitable.
        """
        terms = [term for _, term in self.casts()] + self.promotions
        for node, readers in self.keepers.items():
            terms.append(Term(_once(readers), (FULL_ALWAYS,), kept_picoseconds(node, self.machine, self.dtype)))
            if not is_leaf(node):  # which stays in memory anyway
                terms.append(Term((LOW_ALWAYS,), _once(readers), kept_picoseconds(node, self.machine, "float32")))
        kinds = self.problem.classes
        low = [] if skip else [i for n, i in self.of.items() if kinds[n].cls is OpClass.ALLOW and self.is_free(n)]
        fixed = self.fixed | dict.fromkeys(low, True)
        return Task(tuple(self.full), tuple(self.low), fixed, tuple(self.limits), tuple(terms))

    def casts(self) -> list[tuple[Node, Term]]:
        """Return each value that may be cast, down and up, and the cost of that."""
        lowered = [(n, _once(readers), (self.holds[n],)) for n, readers in self.lowers.items()]
        widened = [(n, (self.holds[n],), _once(readers)) for n, readers in self.widens.items()]
        converted = [(n, (i,), (FULL_ALWAYS,)) for n, i in self.of.items() if self.painted[n].converts_result]
        every = (*lowered, *widened, *converted)
        return [(n, Term(lows, fulls, self._cast_price(n))) for n, lows, fulls in every]

    def is_free(self, node: Node) -> bool:
        """Say whether the precision of ``node`` is chosen by cost."""
        kind = self.problem.classes[node]
        if self.painted[node].precision != LOW or node in self.tied:
            return False
        if kind.cls is OpClass.ALLOW:
            return WISH not in node.meta and kind.origin != "amp_graph.precision"
        return kind.cls in FREE or kind.cls is OpClass.PROMOTE

    def _cast_price(self, node: Node, within: bool = False) -> int:
        # A parameter always counts as trained. It gets a gradient only if one of its readers is trained too.
        has_gradient = is_trained(node) and (node.op != "placeholder" or any(map(is_trained, node.users)))
        return cast_picoseconds(node, self.machine, self.dtype, within) * (1 + has_gradient)

    # -- building --------------------------------------------------------------------------------------

    def build(self) -> Formulation:
        """Create a variable for each operation, then add the costs of its operands."""
        for node in self.problem.gm.graph.nodes:
            self._declare(node)
        for node in self.problem.gm.graph.nodes:
            if node in self.of:
                self._read(node, self.problem.classes[node])
            else:
                self._read_as_captured(node)
        return self

    def _declare(self, node: Node) -> None:
        """Give ``node`` a variable, and record which variable gives the precision of its value."""
        self.holds[node] = FULL_ALWAYS
        if node not in self.problem.classes:
            if is_part(node) and isinstance(node.args[0], Node):
                self.holds[node] = self.holds[node.args[0]]
            return
        choice = self.painted[node]
        i = self.of[node] = len(self.full)
        kind = self.problem.classes[node]
        work = work_of(node, kind)
        self.full.append(picoseconds(work, self.machine, "float32"))
        self.low.append(picoseconds(work, self.machine, self.dtype))
        self.holds[node] = FULL_ALWAYS if choice.converts_result else i
        target = self._followed(node, kind)
        if target is not None:
            self._tie(i, self.holds[target])
            self.tied.add(node)
            if kind.written:
                self.holds[node] = self.holds[target]
        elif not self.is_free(node):
            self.fixed[i] = choice.precision == LOW
        if self.machine.keeps_weights:  # without gradients
            return
        if work.keeps == "output" and is_eligible(captured(node)):
            self.keepers.setdefault(node, []).append(i)
        elif work.keeps == "inputs":
            for source in node.all_input_nodes:
                if source in kind.applies and is_eligible(captured(source)):
                    self.keepers.setdefault(source, []).append(i)

    def _followed(self, node: Node, kind: Classification) -> Node | None:
        """Return the input that dictates the precision of ``node``: one that it writes to, aliases or copies."""
        inputs = [n for n in node.all_input_nodes if is_eligible(captured(n))]
        if kind.conversion:
            moved = [n for n in inputs if n in kind.applies]
            return moved[0] if moved and kind.dtype is None and self.painted[node].precision == LOW else None
        written = next((n for n in inputs if n in kind.written), None)
        return written if written or kind.cls in FREE else self.permitted.ahead.shown.get(node)

    def _tie(self, a: int, b: int) -> None:
        self.limits += [(a, b), (b, a)]

    def _read(self, node: Node, kind: Classification) -> None:
        if node in self.tied:
            if not kind.mixed and not kind.conversion:
                written = [n for n in node.all_input_nodes if n in kind.applies and n not in kind.written]
                self._move(self.of[node], [n for n in written if is_eligible(captured(n))])
        elif self.is_free(node):
            self._read_freely(node, kind)
        else:
            self._read_as_painted(node, kind)

    def _move(self, i: int, sources: Iterable[Node]) -> None:
        for source in sources:
            self.lowers.setdefault(source, []).append(i)
            self.widens.setdefault(source, []).append(i)

    def _widen(self, sources: Iterable[Node]) -> None:
        for source in sources:
            self.widens.setdefault(source, []).append(FULL_ALWAYS)

    def _read_freely(self, node: Node, kind: Classification) -> None:
        i, given = self.of[node], operands(node, kind)
        self._move(i, given.moved)
        self._widen(given.beside)
        for source in given.promoted:
            self.lowers.setdefault(source, []).append(i)
        self._promote(i, given.promoted)
        self._limit(node, kind, given)

    def _promote(self, i: int, sources: tuple[Node, ...]) -> None:
        """Add the cost of low operands to a full-precision operation, which promotes them.

        Promotion by a copy costs as much as a cast without its call; promotion in registers is free. If all operands
        are low, the first one is cast; this cost is added wherever that is possible.
        """
        can_be_low = all(self.fixed.get(self.holds[source], True) for source in sources)
        for position, source in enumerate(sources):
            is_cast = can_be_low and position == 0
            if is_cast or self.machine.promotes_by_copy:
                price = self._cast_price(source, not is_cast)
                self.promotions.append(Term((self.holds[source],), (i,), price))

    def _limit(self, node: Node, kind: Classification, given: Operands) -> None:
        """Add the limits of the accuracy: round nothing that the rule-based planner would not round."""
        i = self.of[node]
        if node in self.permitted.ahead.shown or self.problem.memory.is_written(node):
            for source in filter(lambda s: self._shares(node, s), node.all_input_nodes):
                self._tie(i, self.holds[source])  # a cast between them would break the alias
        follows = kind.cls in (OpClass.FOLLOW, OpClass.FP32_INSIDE, OpClass.PROMOTE, OpClass.NEUTRAL)
        if follows and self._is_exact(node, kind, given):
            self.limits += [(i, self.holds[n]) for n in (*given.moved, *given.promoted)]
        if (node in self.permitted.ahead.early or kind.full_in_autocast) and self.problem.accuracy == "autocast":
            self.limits += [(i, self.of[user]) for user in node.users if user in self.of]

    def _is_exact(self, node: Node, kind: Classification, given: Operands) -> bool:
        """Say whether no operand of ``node`` may be rounded for it."""
        if self.problem.accuracy == "autocast":
            return node not in self.permitted.ahead.early
        read = (*given.moved, *given.promoted)
        return self.problem.accuracy != "fast" and not self.permitted.may_round(node, kind, read)

    def _shares(self, node: Node, source: Node) -> bool:
        storages = self.problem.memory.storages
        return bool(storages.get(node, frozenset()) & storages.get(source, frozenset()))

    def _read_as_painted(self, node: Node, kind: Classification) -> None:
        choice = self.painted[node]
        for source, want in choice.wants.items():
            which = self.lowers if want == LOW else self.widens
            which.setdefault(source, []).append(LOW_ALWAYS if want == LOW else FULL_ALWAYS)
        if kind.cls in FREE and kind.mixed and choice.precision != LOW and not choice.wants:
            self._promote(FULL_ALWAYS, operands(node, kind).promoted)

    def _read_as_captured(self, node: Node) -> None:
        if is_part(node) or (node.op == "output" and not self.problem.keep_outputs):
            return
        self._widen(n for n in node.all_input_nodes if is_eligible(captured(n)))


def _once(variables: list[int]) -> tuple[int, ...]:
    return tuple(dict.fromkeys(variables))


def formulate(problem: Problem, machine: Machine, dtype: str) -> Formulation:
    """Formulate ``problem`` as a task for ``machine`` with the low precision ``dtype`` ("bfloat16", "float16")."""
    permitted = RuleBasedPlan(problem)
    return Formulation(problem, machine, dtype, permitted.run(), permitted).build()


def low_of(choices: Mapping[Node, Choice], made: Formulation) -> frozenset[int]:
    """Return the low variables of any planner's choices, so that plans can be compared by cost."""
    return frozenset({LOW_ALWAYS, *(i for node, i in made.of.items() if choices[node].precision == LOW)})
