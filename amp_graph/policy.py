"""The conversion policy: a frozen value with a text form.

``"bf16"``, ``"fp16-O1,accuracy=fast"``, ``"bf16,keep_fp32=lm_head|.*norm,lists=my.toml"``.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from amp_graph.errors import PolicyError
from amp_graph.lists import OpClass, OpList, effective, merge
from amp_graph.lists.errors import shortened
from amp_graph.lists.fields import LONGEST_NAME
from amp_graph.lists.path_pattern import LEGAL, PatternError, check_pattern
from amp_graph.passes.calibration.calibration import Calibration
from amp_graph.passes.memory.heap_retention import HEAP
from amp_graph.passes.pipeline_options import PipelineOptions

if TYPE_CHECKING:
    from amp_graph.passes.precision.measure_sensitivity import Measured
    from amp_graph.passes.weights.cast_cache import WeightCopies

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
HALVES = tuple(DTYPES.values())
LEVELS = ("O0", "O1", "O2", "O3")
HELD_LOW = ("O2", "O3")  # the levels that hold parameters in low precision
ACCURACIES = ("autocast", "fast")
RECOMPUTED = ("some", "most", "all")
PLANNERS = ("paint", "mincut")
COPIES = ("auto", "true", "false")
BOOLEAN_WORDS = ("weight_copies", "keep_memory", "skip_unprofitable", "replay")  # fields of words: also True and False
REPLAY = ("auto", "true", "false")
UNPROFITABLE = ("graphs", "true", "false")
ESCAPED = ("autocast", "fp32")
ONEDNN_RNN = "aten.mkldnn_rnn_layer"
ALIASES = {"bfloat16": "bf16", "float16": "fp16", "half": "fp16"}


@dataclass(frozen=True)
class Policy:
    """How a model is converted; every field has a word in the text form.

    dtype: "bf16", "fp16", or "auto" (bf16 if the device computes in it, else fp16; fp32 for calls where that is not
    profitable).
    level: "O0" (as is), "O1" (fp32 parameters, casts by plan), "O2" (parameters held in low precision except those
    of norms, with fp32 master weights that optimizers update) or "O3" (all parameters in low precision, no masters).
    accuracy: "autocast" (mixed operands promote, as torch.autocast does), "fast" (low-precision streams), or a number
    above 0, an error budget: the fastest plan whose predicted error is at most that multiple of "autocast"'s error.
    lists: names of built-in lists or paths of TOML files; later ones override earlier ones.
    allow, deny, fp32_inside, follow, neutral, opaque: operations in that class; they override the lists.
    remove: operations whose list entries are ignored.
    keep_fp32: a regular expression; modules whose path matches wholly, and all inside them, stay fp32.
    keep_outputs: cast outputs back to their captured dtype (true), or leave them as computed.
    weight_copies: cast each weight once per optimizer step, and keep the copy until the next one ("true"); or, in
    training, until its last reader has run backward, unless keeping it adds nothing to the peak of memory ("auto"); or
    cast each weight at each call ("false"). See docs/weight-copies.md.
    keep_memory: keep in the process the memory that a step, or a call without gradients, frees ("true"), or not
    ("false"); empty: as set by ``amp_graph.memory.keep_heap``, by default "false".
    device: "cpu" or "cuda" to plan for; empty for the device of the model.
    skip: passes to leave out, by name (``attention``, ``fuse_gelu``, ...; or with dashes) or by
    group (``backend``: passes that only one device or compiler needs); ``amp-graph passes`` lists both.
    recompute: what backward recomputes instead of saving: "some" (what costs little time), "all" that a kernel can
    recompute, or "most" (all but what would slow small networks noticeably); empty: "most" with accuracy "fast", else
    "some". See docs/policy.md.
    planner: "mincut" (the least predicted time on this machine) or "paint" (by neighboring operations, as a baseline);
    empty: "mincut". Lists that reproduce torch.autocast always use "paint".
    skip_unprofitable: what stays in fp32 if low precision is predicted not to be faster: whole calls ("graphs"), single
    matmuls as well ("true"), or nothing ("false"); empty: "graphs" with dtype "auto", else "false".
    escaped: code that escapes capture runs under torch.autocast ("autocast") or in "fp32"; empty: "autocast", but
    "fp32" if the policy has what autocast cannot express: lists in files, ``deny``, ``opaque``, ``calibration``,
    ``keep_ops`` or ``emulate``.
    widen: hold trained parameters that come in half precision in fp32 while the model is converted; ``revert`` rounds
    them again. Frozen ones stay as they are.
    replay: whether forward and backward of calls that repeat are recorded as CUDA graphs and replayed: "true", "false",
    or "auto" (where Python, not the GPU, is the bottleneck); empty: "false". See docs/replay.md.
    calibration: the path of a file of ``amp_graph.calibrate``; operations whose values or gradients the low precision
    cannot hold stay in fp32. See docs/numerics.md.
    keep_ops: operations that stay in fp32, by the keys that ``amp_graph.compare`` and ``amp_graph.bisect`` print:
    module path, operation and number, such as ``layers.3.fc:linear`` or ``layers.3:add.1``.
    emulate: "cuda": plan as for a CUDA device, and compute on the CPU what that would compute: sums in fp32, rounded
    where its kernels round. For trying, calibrating and debugging a policy without a GPU. See docs/fp16-on-a-laptop.md.

    Raises PolicyError for a value that means nothing, with the legal ones.
    """

    dtype: str = "auto"
    level: str = "O1"
    accuracy: str | float = "autocast"
    lists: tuple[str, ...] = ()
    allow: tuple[str, ...] = ()
    deny: tuple[str, ...] = ()
    fp32_inside: tuple[str, ...] = ()
    follow: tuple[str, ...] = ()
    neutral: tuple[str, ...] = ()
    opaque: tuple[str, ...] = ()
    remove: tuple[str, ...] = ()
    keep_fp32: str = ""
    keep_outputs: bool = True
    weight_copies: str = "auto"
    keep_memory: str = ""
    device: str = ""
    skip: tuple[str, ...] = ()
    recompute: str = ""
    planner: str = ""
    skip_unprofitable: str = ""
    escaped: str = ""
    replay: str = ""
    widen: bool = False
    calibration: str = ""
    keep_ops: tuple[str, ...] = ()
    emulate: str = ""

    def __post_init__(self) -> None:
        """Refuse values that mean nothing."""
        for field in dataclasses.fields(self):
            object.__setattr__(self, field.name, _of_type(field.name, field.default, getattr(self, field.name)))
        _check("dtype", self.dtype, (*DTYPES, "auto"))
        _check("level", self.level, LEVELS)
        object.__setattr__(self, "accuracy", _accuracy(self.accuracy))
        _check("device", self.device, ("", "cpu", "cuda"))
        object.__setattr__(self, "skip", _skip_words(self.skip))
        _check("recompute", self.recompute, ("", *RECOMPUTED))
        _check("planner", self.planner, ("", *PLANNERS))
        self._word_booleans()
        _check("weight_copies", self.weight_copies, COPIES)
        _check("keep_memory", self.keep_memory, ("", "true", "false"))
        _check("skip_unprofitable", self.skip_unprofitable, ("", *UNPROFITABLE))
        _check("escaped", self.escaped, ("", *ESCAPED))
        _check("replay", self.replay, ("", *REPLAY))
        _check_path(self.calibration)
        self._check_emulate()
        if self.widen and self.level == "O0":
            raise PolicyError(
                "policy: widen=true with level O0, which leaves the model as it is\n  legal: levels O1, O2, O3\n"
                "  fix:   Policy.parse('bf16,widen=true')"
            )
        if self.planner == "paint" and self.budget is not None:
            raise PolicyError(
                f"policy: planner=paint with accuracy={self.accuracy:g}: this planner has no error budget\n"
                f"  legal: planner=mincut, the default\n  fix:   Policy(accuracy={self.accuracy:g})"
            )
        try:
            check_pattern(self.keep_fp32)
        except PatternError as error:
            raise PolicyError(
                f"policy: keep_fp32={shortened(self.keep_fp32)} is not a regular expression: {error.what}\n"
                f"  legal: {LEGAL}\n"
                "  fix:   Policy.parse('bf16,keep_fp32=lm_head|.*norm')"
            ) from error

    def _word_booleans(self) -> None:
        for name in BOOLEAN_WORDS:
            if isinstance(getattr(self, name), bool):
                object.__setattr__(self, name, str(getattr(self, name)).lower())

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a pickle, which may be of a version in which some words were booleans."""
        self.__dict__.update(state)
        self._word_booleans()

    @property
    def budget(self) -> float | None:
        """The error budget if ``accuracy`` is a number, else None."""
        return None if isinstance(self.accuracy, str) else self.accuracy

    @property
    def recomputes(self) -> str:
        """How much backward recomputes: ``recompute``, or its default."""
        return self.recompute or ("most" if self.accuracy == "fast" else "some")

    @property
    def runs_escaped(self) -> str:
        """How code that escapes capture runs: ``escaped``, or its default."""
        own = bool(self.deny or self.opaque or self.calibration or self.keep_ops or self.emulate)
        own = own or any(name.endswith(".toml") for name in self.lists)
        return self.escaped or ("fp32" if own else "autocast")

    @property
    def keeps_memory(self) -> bool:
        """Whether memory is kept between steps: ``keep_memory``, or its current default."""
        asked = self.keep_memory == "true" or (not self.keep_memory and HEAP.by_default)
        return asked and self.level != "O0"

    @property
    def replays(self) -> str:
        """Whether calls are recorded: ``replay``, or its default; never at level O0, which captures nothing."""
        return "false" if self.level == "O0" else self.replay or "false"

    @property
    def plans_by(self) -> str:
        """The planner in force: ``planner``, or its default."""
        return self.planner or "mincut"

    @property
    def leaves(self) -> str:
        """What stays fp32 if low precision is not profitable: ``skip_unprofitable``, or its default."""
        return self.skip_unprofitable or ("graphs" if (self.dtype, self.level) == ("auto", "O1") else "false")

    @staticmethod
    def parse(text: str | Policy | None) -> Policy:
        """Parse a policy's text form. Raises PolicyError for an unknown word."""
        if isinstance(text, Policy):
            return text
        if text is None:
            return Policy()
        if not isinstance(text, str):
            raise PolicyError(
                f"policy: {shortened(text)} is a {type(text).__name__}\n  legal: a Policy or its text form\n"
                "  fix:   policy='bf16'"
            )
        words = [w.replace("\\,", ",").strip() for w in re.split(r"(?<!\\),", text)]
        fields: dict[str, Any] = {}
        before = ""
        for word in filter(None, words):
            found = _field(word, text, before)
            before = word if "=" in word else ""
            for name in found.keys() & fields.keys():
                raise PolicyError(
                    f"policy: {shortened(text)} sets {name} twice, {shortened(fields[name])} and "
                    f"{shortened(found[name])}\n  fix:   keep one of them"
                )
            fields.update(found)
        return Policy(**fields)

    def __str__(self) -> str:
        """Return the text form; ``Policy.parse(str(policy)) == policy``."""
        words = [f"{self.dtype}-{self.level}"]
        for field in dataclasses.fields(self)[2:]:
            value = getattr(self, field.name)
            if value != field.default:
                shown = (
                    "|".join(value)
                    if isinstance(value, tuple)
                    else str(value).lower()
                    if isinstance(value, bool)
                    else value
                )
                word = f"{field.name}={shown}".replace(",", "\\,")
                words.append(f"{word} " if word.endswith("\\") else word)  # it would hide the comma after it
        return ",".join(words)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain values (lists for tuples)."""
        return {k: list(v) if isinstance(v, tuple) else v for k, v in dataclasses.asdict(self).items()}

    @staticmethod
    def from_dict(fields: dict[str, Any]) -> Policy:
        """Return the policy of a ``to_dict`` result. Raises PolicyError for an unknown field or a wrong type."""
        known = {f.name for f in dataclasses.fields(Policy)}
        if not isinstance(fields, Mapping):
            raise PolicyError(
                f"policy: {shortened(fields)} is a {type(fields).__name__}\n  legal: a dict of fields\n"
                "  fix:   Policy.from_dict({'dtype': 'bf16'})"
            )
        for name in fields:
            if name not in known:
                raise PolicyError(_unknown("field", str(name), known))
        return Policy(**fields)

    def torch_dtype(self, device: str) -> torch.dtype:
        """Return the low precision for ``device`` ("cpu", "cuda")."""
        if self.dtype != "auto":
            return DTYPES[self.dtype]
        if (
            device == "cuda"
            and torch.cuda.is_available()
            and not torch.cuda.is_bf16_supported(including_emulation=False)
        ):
            return torch.float16
        return torch.bfloat16

    def measured_ranges(self) -> Calibration | None:
        """Return the calibration that the policy names; None without one. Raises CalibrationError for a bad file."""
        if not self.calibration:
            return None
        try:
            changed = os.stat(self.calibration).st_mtime_ns
        except (OSError, ValueError):
            changed = 0
        return _calibration(self.calibration, changed)

    def op_list(self, device: str) -> OpList:
        """Return the lists in force for ``device``. Raises ListError, and PolicyError if they contradict the policy."""
        where = self._planned_for(device)
        dtype = str(self.torch_dtype(device)).removeprefix("torch.")
        classes = {
            c: getattr(self, c) for c in ("allow", "deny", "fp32_inside", "follow", "neutral", "opaque", "remove")
        }
        where = where if where in ("cpu", "cuda") else "cuda"
        self.measured_ranges()  # a bad file raises here, not at the first capture
        found = effective(self.lists, dtype=dtype, device=where, accuracy=self.accuracy, **classes)
        if self.emulate:
            found = _with_cpu_names(found)
        if self.skip_unprofitable in ("true", "graphs"):
            self._check_skips(found)
        if self.budget is not None and found.unlisted != "opaque":
            raise PolicyError(
                f"policy: accuracy={self.budget:g} with lists that reproduce torch.autocast, without a budget\n"
                "  legal: an error budget with the default lists or others over them\n"
                f"  fix:   Policy.parse('{self.dtype},accuracy={self.budget:g}')"
            )
        return found

    def pipeline_options(
        self,
        device: str,
        *,
        eager: bool = False,
        inductor: Mapping[str, Any] | None = None,
        in_step: bool = False,
        portable: bool = False,
        measured: tuple[Measured, ...] = (),
        copies: WeightCopies | None = None,
        user: object = None,
    ) -> PipelineOptions:
        """Return the options that select passes for a graph on ``device``, with gradients if they are enabled now."""
        skip = _passes_named(self.skip)
        lists = self.op_list(device)
        if ("gru-state" in skip or portable) and lists.rules.get("aten.gru.input"):  # torch's kernel rounds the state
            lists = merge(lists, remove=("aten.gru.input",))
        return PipelineOptions(
            lists=lists,
            dtype=self.torch_dtype(device),
            device=device,
            planned_for=self._planned_for(device),
            emulates=bool(self.emulate),
            accuracy=self.accuracy,
            keep_fp32=self.keep_fp32,
            keep_outputs=self.keep_outputs,
            planner=self.plans_by,
            leaves=self.leaves,
            recompute=self.recomputes,
            weight_copies=self.weight_copies != "false" and not self.emulate,
            keep_memory=self.keeps_memory,
            skip=skip,
            eager=eager,
            inductor=inductor,
            in_step=in_step,
            training=torch.is_grad_enabled(),
            portable=portable,
            measured=measured,
            calibration=self.measured_ranges(),
            keep_ops=self.keep_ops,
            copies=copies,
            user=user,
        )

    def _planned_for(self, device: str) -> str:
        """Return the device to plan for. Raises PolicyError for an emulation anywhere but on the CPU."""
        if self.emulate and device not in ("cpu", "meta"):
            raise PolicyError(
                f"policy: emulate={self.emulate} for a model on a {device} device, which needs no emulation\n"
                "  legal: emulate=cuda for a model on the CPU\n"
                f"  fix:   policy='{replace(self, emulate='')}', or model.cpu()"
            )
        return self.device or self.emulate or device

    def _check_emulate(self) -> None:
        _check("emulate", self.emulate, ("", "cuda"))
        if self.emulate and self.device not in ("", self.emulate):
            raise PolicyError(
                f"policy: emulate={self.emulate} with device={self.device}, a plan for another device\n"
                "  legal: emulate=cuda without device=\n"
                "  fix:   policy='fp16,emulate=cuda'"
            )

    def _check_skips(self, lists: OpList) -> None:
        """Refuse ``skip_unprofitable`` with a planner that predicts no times."""
        painted = self.plans_by != "mincut" and self.skip_unprofitable == "true"
        if lists.unlisted == "opaque" and not painted:
            return
        why = "which predicts no times" if painted else "and lists that reproduce torch.autocast"
        raise PolicyError(
            f"policy: skip_unprofitable={self.skip_unprofitable} with planner={self.plans_by}, {why}\n"
            "  legal: planner=mincut, with the default lists or others over them\n"
            "  fix:   Policy.parse('bf16,skip_unprofitable=true')"
        )


@functools.lru_cache(maxsize=8)
def _calibration(path: str, changed: int) -> Calibration:
    """Read a calibration once for each time that it is written."""
    return Calibration.load(path)


def _with_cpu_names(lists: OpList) -> OpList:
    """Return CUDA's lists with the name that an LSTM has in a graph that was captured on the CPU."""
    rules = lists.rules.get("aten.lstm", ())
    return merge(lists, allow=(ONEDNN_RNN,)) if any(rule.cls is OpClass.ALLOW for rule in rules) else lists


def word_of(dtype: torch.dtype) -> str:
    """Return the word for a low precision: "bf16", "fp16"."""
    return next(word for word, known in DTYPES.items() if known == dtype)


def _field(word: str, text: str, before: str = "") -> dict[str, Any]:
    """Read one word of a policy's text, which follows ``before``, a ``name=value``, or "" if it follows another."""
    if "=" not in word:
        return _head(word, text, before)
    name, value = (part.strip() for part in word.split("=", 1))
    known = {f.name: f for f in dataclasses.fields(Policy)}
    if name not in known:
        raise PolicyError(_unknown("word", name, set(known), text))
    default = known[name].default
    if isinstance(default, tuple):
        return {name: tuple(filter(None, value.split("|")))}
    if isinstance(default, bool):
        _check(name, value, ("true", "false"))
        return {name: value == "true"}
    return {name: ALIASES.get(value, value) if name == "dtype" else value}


def _head(word: str, text: str, before: str = "") -> dict[str, Any]:
    """Read ``bf16``, ``O1`` or ``fp16-O1``."""
    fields: dict[str, Any] = {}
    for part in word.split("-"):
        part = ALIASES.get(part, part)
        if part in (*DTYPES, "auto"):
            fields["dtype"] = part
        elif part in LEVELS:
            fields["level"] = part
        else:
            legal = {*DTYPES, "auto", *LEVELS} | {f"{f.name}=..." for f in dataclasses.fields(Policy)}
            raise PolicyError(_unknown("word", part, legal, text, before))
    return fields


def _unknown(what: str, name: str, legal: set[str], text: str = "", before: str = "") -> str:
    """Say that ``name`` is unknown; ``before`` is the ``name=value`` that it follows, of which it may be a value."""
    alias = ALIASES.get(name.removeprefix("torch."))  # a torch.dtype
    known = {w.removesuffix("=...").lower(): w.removesuffix("=...") for w in legal}
    near = difflib.get_close_matches(name[:LONGEST_NAME].lower(), known, 1, 0.5)
    hint = f"did you mean {alias or known[near[0]]!r}?" if alias or near else "policy='bf16,accuracy=fast'"
    if before and isinstance(getattr(Policy, before.partition("=")[0].strip(), ()), tuple) and not alias:
        hint = f"several values are separated by |: {shortened(before.strip() + '|' + name)}"
    hint = f"\n  fix:   {hint}"
    where = f" in {shortened(text)}" if text else ""
    return f"policy: unknown {what} {shortened(name)}{where}\n  legal: {', '.join(sorted(legal))}{hint}"


def _accuracy(value: Any) -> str | float:
    """Parse an accuracy: a word, a number, or a number's text."""
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            _check("accuracy", value, (*ACCURACIES, "a number such as 1.5"))
            return value
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= sys.float_info.max:
        raise PolicyError(
            f"policy: accuracy={shortened(value)} is not an error budget\n"
            "  legal: a number above 0, of which 1 is the predicted error of torch.autocast's plan; autocast; fast\n"
            "  fix:   policy='bf16,accuracy=1.5'"
        )
    return float(value)


def _skip_words(words: tuple[str, ...]) -> tuple[str, ...]:
    """Return the current names of the words of ``skip=``, without those of passes that were deleted.

    Raises PolicyError for an unknown pass or group.
    """
    if not words:
        return ()
    # This import loads every pass.
    from amp_graph.passes.pipeline_skips import GROUPS, current_word, is_deleted, is_legal, is_pass, nearest

    left = [word for word in words if not is_deleted(current_word(word))]
    found = tuple(map(current_word, left))
    for word, given in zip(found, left, strict=True):
        if not is_legal(word):
            near = nearest(given[:LONGEST_NAME])
            raise PolicyError(
                f"policy: skip={shortened(given)}: {'this pass is not optional' if is_pass(word) else 'no such pass'}\n"
                f"  legal: an optional pass that `amp-graph passes` lists, or a group: {', '.join(sorted(GROUPS))}\n"
                + (f"  fix:   did you mean {' or '.join(map(repr, near))}?" if near else "  fix:   skip=backend")
            )
    return found


def _passes_named(words: tuple[str, ...]) -> dict[str, str]:
    if not words:
        return {}
    from amp_graph.passes.pipeline_skips import passes_named  # loads every pass

    return passes_named(words)


def _of_type(name: str, default: Any, value: Any) -> Any:
    """Return ``value`` as a field stores it: a list as a tuple. Raises PolicyError for a wrong type."""
    if name == "accuracy" or (name in BOOLEAN_WORDS and isinstance(value, bool)):
        return value
    if isinstance(default, tuple):
        value = tuple(value) if isinstance(value, list) else value
        if isinstance(value, tuple) and all(isinstance(word, str) for word in value):
            return value
        legal = "names, in a tuple"
        fix = f"Policy({name}=({value!r},))" if isinstance(value, str) else f"Policy({name}=())"
    elif isinstance(value, type(default)) or (isinstance(default, str) and name != "keep_fp32"):
        return value  # accepts a number as well; checked later
    else:
        legal = "True, False" if isinstance(default, bool) else "a string"
        fix = f"Policy({name}={default!r})"
    raise PolicyError(
        f"policy: {name}={shortened(value)} is a {type(value).__name__}\n  legal: {legal}\n  fix:   {fix[:300]}"
    )


def _check_path(path: Any) -> None:
    if not isinstance(path, str) or "\0" in path:
        raise PolicyError(
            f"policy: calibration={shortened(path)} is no path\n  legal: a file of amp_graph.calibrate\n"
            "  fix:   policy='fp16,calibration=run.json'"
        )


def _check(name: str, value: Any, legal: tuple[str, ...]) -> None:
    if not isinstance(value, str) or value not in legal:
        raise PolicyError(
            _unknown(f"{name} value", value if isinstance(value, str) else shortened(value), {w for w in legal if w})
        )
