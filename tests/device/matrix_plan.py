"""What the matrix draws: factors of builds and of calls, what goes with what, and a greedy pairwise cover of them."""
from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from calls import Drawn

from gdn_codegen.schedule import Schedule, varied

Row = dict[str, Any]


@dataclass(frozen=True)
class Way:
    """The schedule of a row. plan: None where the op chooses; arch: of kernels for one architecture; parts: chunks of a part,
    where sequences are split."""

    plan: Schedule | None = None
    arch: str = ""
    parts: int = 0


#: Factors that decide a build (on Triton head counts do), and factors of calls alone.
LEVELS: dict[str, tuple[Any, ...]] = {
    "K": (16, 32, 60, 64, 96, 100, 128, 160, 192, 256), "V": (16, 32, 60, 64, 96, 100, 128, 160, 192, 256),
    "chunk": (None, 16, 32, 64, 128), "dtype": ("float16", "bfloat16", "float32"), "layout": ("bthd", "bhtd", "bsnd", "bnsd"),
    "heads": ((1, 1), (2, 2), (1, 2), (2, 4), (1, 3), (1, 4), (2, 8)), "gate": ("log", "linear", "raw"),
    "gate_dtype": ("float32", "float16", "bfloat16"), "beta": ("given", "sigmoid", "twice_sigmoid"),
    "beta_dtype": ("float32", "float16", "bfloat16"), "l2norm": (False, True),
    "state": ("none", "given", "replaced", "pool in place", "pool to new", "pool to pool"),
    "state_dtype": ("float32", "bfloat16", "float16"), "v_first": (False, True), "views": (False, True), "checkpoints": (0, 1, 3)}
CALL: dict[str, tuple[Any, ...]] = {
    "lengths": ("ragged", "tiny", "none", "edges", "equal", "long", "many"), "alike": (None, 0.0, 0.02, 0.3),
    "beta_value": (None, 0.5, 1.0, 1.5, 2.0), "gate_mean": (0.0, -1e-3, -0.1, -1.0, -25.0), "out": (False, True),
    "extra_rows": (0, 3), "skip": (False, True)}
#: CPU tensors, few and small: Triton is interpreted there, and TileLang's C is slow.
SMALL: dict[str, tuple[Any, ...]] = {"K": (16, 32, 60, 64), "V": (16, 32, 60, 64), "chunk": (None, 16, 32, 64),
                                     "heads": ((1, 1), (1, 2), (2, 4), (1, 3), (1, 4)),
                                     "lengths": ("ragged", "tiny", "none", "edges", "equal")}


ON_HOPPER = " on sm_90a"
#: Where the op chooses the schedule.
OPEN = ("auto", "auto in parts", "decode")
NAMED = ("fused", "replay", "staged", "prepared", "prepared_vk", "walk", "operand_walk", "fused_walk")
#: Fields of schedules, each a factor by itself. None: as the named schedule has it.
OPTIONS: dict[str, tuple[Any, ...]] = {"inverse": (None, "doubling"), "v_block": (None, 32, 64),
                                       "partition": (None, "exact", "decay", "longest first")}
#: Those that one target has.
OWN_OPTIONS: dict[str, dict[str, tuple[Any, ...]]] = {
    "triton": {"stages": (None, 3), "descriptors": (None, True)}, "tilelang": {"value_heads": (None, 2, 4)}}
FIELDS = ("inverse", "v_block", "partition", "stages", "descriptors", "value_heads")
#: What kernels of warp groups take of other factors.
WARP_GROUPS: dict[str, tuple[Any, ...]] = {
    "chunk": (64,), "dtype": ("float16", "bfloat16"), "K": (64, 96, 128), "V": (64, 96, 128), "inverse": (None,),
    "v_block": (None,), "partition": (None, "decay", "longest first")}
#: Fields of a schedule, and chunks of a part, for a level of "partition".
PARTS: dict[Any, tuple[dict[str, Any], int]] = {
    None: ({}, 0), "exact": ({"partition": "exact"}, 1), "decay": ({"partition": "decay"}, 2),
    "longest first": ({"partition": "decay", "longest_first": True}, 2)}


def schedules(target: str, hopper: bool) -> tuple[str, ...]:
    """The levels of the factor "schedule" for a target."""
    return OPEN + NAMED + (("walk" + ON_HOPPER, "fused_walk" + ON_HOPPER) if hopper and target == "tilelang" else ())


def options(target: str, hopper: bool) -> dict[str, tuple[Any, ...]]:
    """The fields of schedules that are factors for a target. Tensor descriptors need a GPU that has TMA."""
    own = OWN_OPTIONS.get(target, {})
    return OPTIONS | {n: levels for n, levels in own.items() if hopper or n != "descriptors"}


def way(row: Row) -> Way:
    """The schedule that the levels of a row make."""
    if row["schedule"] in OPEN:
        return Way(parts=2 if row["schedule"] == "auto in parts" else 0)
    name, _, arch = row["schedule"].partition(" on ")
    fields, parts = PARTS[row["partition"]]
    own = {n: row[n] for n in FIELDS if n != "partition" and row.get(n) is not None}
    return Way(varied(name, arch, **own, **fields), arch, parts)


def goes(row: Row) -> bool:
    """Whether the levels of a row, which may lack some, go together."""
    on = lambda name, *levels: name in row and row[name] in levels
    has = lambda name, *levels: name in row and row[name] not in levels
    hopper = "schedule" in row and row["schedule"].endswith(ON_HOPPER)
    wrong = [
        (on("schedule", *OPEN) or on("chunk", None)) and any(has(n, None) for n in FIELDS),
        hopper and any(has(n, *levels) for n, levels in WARP_GROUPS.items()),
        on("schedule", "decode") and (has("chunk", 16) or has("checkpoints", 0) or on("lengths", "edges", "long")),
        on("chunk", None) and has("schedule", "auto", "auto in parts"),
        "heads" in row and row["heads"][1] % (row["heads"][0] * (row.get("value_heads") or 1)) > 0,
        has("beta_value", None) and has("beta", "given"),
        has("gate_mean", 0.0) and on("gate", "raw"),
        on("skip", True) and on("state", "none", "given", "replaced"),
        has("extra_rows", 0) and on("lengths", "equal"),
        on("lengths", "long") and on("checkpoints", 1)]
    return not any(wrong)


class Cover:
    """Rows of a target's levels that take in each pair of levels of two factors: the same for the same seed. fits: says why a
    build of such a row has no room, "" where it has."""

    def __init__(self, target: str, seed: int, hopper: bool, small: bool, fits: Callable[[str, Way, Row], str],
                 calls: int = 3) -> None:
        self.target, self.fits, self.calls = target, fits, calls
        self.random = random.Random(f"{target} {seed}")
        less = SMALL if small else {}
        self.build = {"schedule": schedules(target, hopper), **options(target, hopper),
                      **{n: less.get(n, x) for n, x in LEVELS.items()}}
        self.call = {n: less.get(n, x) for n, x in CALL.items()}
        self.levels = {**self.build, **self.call}
        self.left = {pair for a, b in combinations(self.levels, 2) for x in self.levels[a] for y in self.levels[b]
                     if goes(dict([*(pair := ((a, x), (b, y)))]))}
        self.pairs, self.without_room, self._tried = len(self.left), set(), Counter()

    def pairs_of(self, row: Row) -> set[Any]:
        return {(a, b) for a, b in combinations([(n, row[n]) for n in self.levels if n in row], 2)}

    def met(self, rows: Iterable[Row]) -> tuple[int, int]:
        """How many pairs rows have, and how many there are, less those that no build has room for: a later row may have made one
        fit that was given up."""
        met = set().union(*map(self.pairs_of, rows))
        return len(met), self.pairs - len(self.without_room - met)

    def _news(self, row: Row, name: str, level: Any) -> int:
        """How many pairs a level would add to a row."""
        order = list(self.levels)
        at = order.index(name)
        return sum(((n, x), (name, level)) in self.left if order.index(n) < at else ((name, level), (n, x)) in self.left
                   for n, x in row.items())

    def _filled(self, row: Row, factors: dict[str, tuple[Any, ...]]) -> Row:
        """The row with a level for each of these factors, those with most news first met."""
        row, names = dict(row), [n for n in factors if n not in row]
        self.random.shuffle(names)
        names.sort(key=lambda n: n != "schedule")  # first, since most of what does not go together is about it
        for name in names:
            levels = [x for x in factors[name] if goes({**row, name: x})]
            best = max(((self._news(row, name, x), self.random.random(), i) for i, x in enumerate(levels)))
            row[name] = levels[best[2]]
        return row

    def _best(self, row: Row, factors: dict[str, tuple[Any, ...]], tries: int) -> Row:
        rows = [self._filled(row, factors) for _ in range(tries)]
        return max(rows, key=lambda r: len(self.pairs_of(r) & self.left))

    def _start(self) -> Row:
        """Two levels that no row has together yet, of builds where there are such; nothing where all is covered."""
        left = sorted((p for p in self.left if p[0][0] in self.build and p[1][0] in self.build), key=repr) or \
            sorted((p for p in self.left), key=repr)
        return {n: x for n, x in self.random.choice(left) if n in self.build} if left else {}

    def rows(self, more: bool = False) -> Iterator[list[Row]]:
        """The calls of one build after the other until each pair is met; more: then on, at random."""
        while self.left or more:
            base = self._best(self._start(), self.build, 8 if self.left else 1)
            why = self.fits(self.target, way(base), base)
            rows = [self._best(base, self.call, 4)]
            if why:  # tried once, and its pairs with it, which other levels beside them may make fit
                self._tried.update(p := self.pairs_of(rows[0]) & self.left)
                lost = {x for x in p if self._tried[x] >= 3}
                self.without_room |= lost
                self.left -= lost
                yield [{**rows[0], "no room": why}]
                continue
            for _ in range(self.calls):
                self.left -= self.pairs_of(rows[-1])
                if len(rows) < self.calls:
                    rows.append(self._best(base, self.call, 4))
            yield rows


def _lengths(kind: str, C: int, most: int, r: random.Random) -> list[int]:
    some = lambda: r.randint(0, most)
    out = {"tiny": [r.randint(0, 5) for _ in range(r.randint(1, 4))], "none": [0] * r.randint(1, 2), "edges": [C, 2 * C, 3 * C],
           "ragged": r.sample([0, 1, C - 1, C, C + 1, 2 * C + 3, some(), some()], 4), "equal": [some()] * r.randint(1, 3),
           "long": [12 * C + 5, 0, 7 * C + 1], "many": [r.randint(0, C + 1) for _ in range(40)]}[kind]
    return [min(n, most) for n in out] if most <= 16 else out


def drawn(target: str, row: Row, plan: Schedule | None, seed: int, tf32: bool) -> Drawn:
    """The call that a row stands for, by a schedule, or by the op's choice where plan is None."""
    r = random.Random(seed)
    decode, C, state = row["schedule"] == "decode", row["chunk"] or 64, row["state"]
    lengths = _lengths(row["lengths"], C, 16 if decode else 3 * C, r)
    same = {n: row[n] for n in ("K", "V", "dtype", "chunk", "layout", "gate", "gate_mean", "gate_dtype", "beta", "beta_dtype",
                                "l2norm", "state_dtype", "v_first", "views", "out", "extra_rows", "checkpoints", "alike",
                                "beta_value")}
    return Drawn(seed=seed, target=target, lengths=lengths, batched=row["lengths"] == "equal", H=row["heads"][0],
                 HV=row["heads"][1], initial=state != "none", in_place=state == "replaced", decode=decode, schedule=plan,
                 pool={"pool in place": "in place", "pool to new": "dense", "pool to pool": "buffer"}.get(state, ""), tf32=tf32,
                 skipped=[n for n in range(len(lengths)) if r.random() < 0.5] if row["skip"] else [], **same)
