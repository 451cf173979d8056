"""A schedule is data: which values leave the chip, in which form, computed by whom."""
from __future__ import annotations

import re
from dataclasses import dataclass, fields, replace
from typing import Any

from ..ir.core import Program, loops, walk

FORMS = ("direct", "wy", "gate-free", "split", "unit")
#: What a form adds to a page's values.
ADDS = {"wy": ("W", "U0"), "split": ("Tb",), "unit": ("Toff",)}
INVERSES = ("substitution", "doubling")
STATES = ("kv", "vk")
LAUNCHES = ("kernels", "single")
ORDERS = ("page", "list")
PREFETCHES = ("no", "operands", "loads", "all")
EARLY = ("all", "state")
PARTITIONS = (None, "exact", "decay")


#: Fields that take one of a few values.
CHOICES: dict[str, tuple[Any, ...]] = {
    "form": FORMS, "inverse": INVERSES, "inverse_dtype": ("input", "float32"), "launch": LAUNCHES, "partition": PARTITIONS,
    "order": ORDERS, "lanes": (1, 2), "prefetch": PREFETCHES, "channel_slots": (1, 2), "l0_slots": (1, 2), "state": STATES,
    "stages": (1, 2, 3, 4), "early": EARLY, "warps": (0, 1, 2, 4, 8, 16), "value_heads": (1, 2, 4),
    "inverse_block": (0, 16, 32, 64), "cache_masks": (False, True), "longest_first": (False, True),
    "descriptors": (False, True)}


class ScheduleError(ValueError):
    """A schedule that does not fit its algorithm or itself."""


@dataclass(frozen=True)
class Schedule:
    """How an algorithm is cut and computed.

    name: letters, digits and _, for file names have it.
    kernels: groups of value names. A group is one kernel and writes the values it names to global memory; later groups
      read them, and what no group names is recomputed where it is needed.
    form: "direct"; "wy" (what multiplies the state is split off as W and U0, so that they do not wait for it);
      "gate-free" (decay factored out of the inverse); "split" (what the inverse, Tb, multiplies in two products, of which one
      does not wait for the state; the column that scales it goes to what reads the product, else into Tb); "unit" (what the
      ones on the inverse's diagonal give is added in float32, not multiplied: Toff, the inverse without them; the column
      that scales both what is inverted and what that multiplies goes to what reads the product).
    state: "kv", or "vk": kernels that walk the chunks hold tiles whose last dim is V transposed.
    inverse: "substitution" (blocks that the device solves by itself, then merged; "doubling" where it solves none)
      or "doubling" (blocks of 1, 2, 4... rows merged).
    v_block: columns of V a kernel instance computes, V or more for all; 0 for what the device takes for walks (Triton: 64)
      and all elsewhere. Applies where all that a kernel writes has V.
    launch: "kernels", or "single" for one launch with barriers over the device between kernels (PTO).
    inverse_dtype: dtype of the operands of the inverse's products: "input" (that of q) or "float32".
    partition: how a long sequence is split into parts that run side by side: "exact", by what each part makes of a state;
      "decay", where a part's walk begins some chunks early, and by the former where gates remember; None for no parts.
    part_chunks: chunks of a part; 0 for what the host's cost model takes.

    Where cores share no memory (PTO), as far as there is room on the chip:
    cache_masks: masks are loaded once a core group rather than once an instance.
    lanes: value heads that a core group computes side by side in kernels over chunks.
    inverse_block: diagonal blocks of this size (16, 32, 64) are inverted apart where the chunk has two; 0 for whole tiles.
    order: "page" (ops in the page's order) or "list" (list scheduling by the device's rates).
    prefetch: what a walk over chunks does one chunk ahead: "no" (nothing), "operands" (loads of what products read),
      "loads", "all" (whatever needs no state).
    channel_slots: tiles of a workspace between cores, which turns take one after the other.
    l0_slots: operands of products that each of L0A and L0B holds at a time.

    stages: turns that loads may run ahead of those who read them: warp groups (an architecture such as sm_90a), Triton.
    early: what a part's walk computes in the chunks before its own, there too: "all" that it does in its own, or the "state"
      alone.
    longest_first: of parts that begin early, those that do so by more than half their length are walked first, there too.
    value_heads: value heads of one key head that an instance of a kernel over chunks computes, where it has products; HV is
      such a multiple of H (TileLang).
    warps: warps of a kernel instance, counted in 32 threads (Triton); 0 for what its largest tile needs.
    descriptors: walks read whole rows of q and their like by tensor descriptors, which end with the sequence (Triton; TMA).
    """

    name: str
    kernels: tuple[tuple[str, ...], ...]
    form: str = "direct"
    inverse: str = "substitution"
    v_block: int = 0
    inverse_dtype: str = "input"
    launch: str = "kernels"
    partition: str | None = None
    part_chunks: int = 0
    cache_masks: bool = True
    lanes: int = 2
    order: str = "list"
    inverse_block: int = 64
    prefetch: str = "no"
    channel_slots: int = 1
    l0_slots: int = 2
    state: str = "kv"
    stages: int = 2
    early: str = "all"
    longest_first: bool = False
    warps: int = 0
    value_heads: int = 1
    descriptors: bool = False

    def __post_init__(self) -> None:
        if not (isinstance(self.name, str) and re.fullmatch("[A-Za-z0-9_]+", self.name)):
            raise ScheduleError(f"schedule: got the name {self.name!r}; accepted: letters, digits and _ of ASCII")
        groups = self.kernels
        if not isinstance(groups, (list, tuple)) or not all(isinstance(g, (list, tuple)) for g in groups) \
                or not all(isinstance(n, str) for g in groups for n in g):
            raise ScheduleError(f"schedule {self.name}: kernels={groups!r}; accepted are groups of names, as "
                                "(('G', 'Tinv'), ('o', 'S'))")
        object.__setattr__(self, "kernels", tuple(map(tuple, groups)))  # lists cannot be hashed
        for field, accepted in CHOICES.items():
            value = getattr(self, field)
            if not any(type(value) is type(x) and value == x for x in accepted):
                raise ScheduleError(f"schedule {self.name}: {field}={value!r}; accepted are {', '.join(map(str, accepted))}")
        for field in ("v_block", "part_chunks"):
            value = getattr(self, field)
            if type(value) is not int or value < 0:
                raise ScheduleError(f"schedule {self.name}: {field}={value!r}; accepted are whole numbers from 0")
        if self.part_chunks and not self.partition:
            raise ScheduleError(f"schedule {self.name}: part_chunks={self.part_chunks}; accepted are 0 and, with a partition, "
                                "more")
        if self.longest_first and self.partition != "decay":
            raise ScheduleError(f"schedule {self.name}: longest_first=True; accepted with partition='decay' alone")
        names = [n for group in self.kernels for n in group]
        twice = sorted({n for n in names if names.count(n) > 1})
        if twice:
            raise ScheduleError(f"schedule {self.name}: {', '.join(twice)} stands in kernels twice")
        if not all(self.kernels):
            raise ScheduleError(f"schedule {self.name}: kernels has an empty group")

    def adapted(self, p: Program, joined: bool = False) -> Schedule:
        """This schedule for a family member that lacks some of its values: those names and empty groups drop out. And where the
        device has tiles of tokens `joined`, form "split" of the schedules that have it is "unit".

        For groups of the named schedules, which serve every algorithm; groups of one's own are taken to the letter.
        """
        base = next((s for s in SCHEDULES.values() if s.kernels == self.kernels), None)
        if base is None:
            return self
        if joined and self.form == base.form and base.name in JOINED:
            return replace(self, **JOINED[base.name])._adapted(p)
        return self._adapted(p)

    def _adapted(self, p: Program) -> Schedule:
        loop = next(loops(p.kernels[0].body))
        have = {o.out for o in walk(p.kernels[0].body)} | {c.name for c in loop.carried}
        has_inverse = any(o.kind == "unit_lower_inverse" for o in loop.body if not hasattr(o, "body"))
        added = set(ADDS.get(self.form, ())) if has_inverse else set()
        groups = tuple(tuple(n for n in g if n in have | added) for g in self.kernels)
        form = self.form if has_inverse else "direct"
        return replace(self, kernels=tuple(g for g in groups if g), form=form)


SCHEDULES = {s.name: s for s in (
    Schedule("staged", (("G",), ("A",), ("Tinv",), ("W", "U0"), ("S", "U"), ("o",)), form="wy"),
    Schedule("prepared", (("G", "A"), ("W", "U0"), ("S", "U"), ("o",)), form="wy", lanes=1),  # two would take more flags
    Schedule("prepared_vk", (("G", "A"), ("W", "U0"), ("S", "U"), ("o",)), form="wy", lanes=1, state="vk"),
    Schedule("replay", (("G", "Tinv"), ("o", "S"))),
    Schedule("walk", (("G", "Tb"), ("o", "S")), form="split", state="vk", early="state"),
    Schedule("fused", (("o", "S"),), prefetch="all"),
    Schedule("fused_walk", (("G", "beta"), ("o", "S")), form="split", state="vk", stages=3, early="state"),
)}

#: What the schedules of form "split" are where v needs no product of its own.
JOINED: dict[str, dict[str, Any]] = {"walk": {"form": "unit", "kernels": (("G", "Toff", "beta"), ("o", "S"))},
                                     "fused_walk": {"form": "unit"}}


def named(name: str) -> Schedule:
    """The schedule called `name`."""
    if name not in SCHEDULES:
        raise ScheduleError(f"schedule: got {name!r}; accepted: {', '.join(SCHEDULES)}")
    return SCHEDULES[name]


def spelled(value: Any) -> str:
    """A field's value as `--set` takes it: a number, a name, or groups of names as G,Tinv/o,S."""
    return "/".join(map(",".join, value)) if isinstance(value, tuple) else f"{value:d}" if isinstance(value, int) else str(value)


def varied(name: str, **changes: Any) -> Schedule:
    """The schedule called `name` with some of its fields changed."""
    return replace(named(name), **changes)


def changes(s: Schedule) -> dict[str, Any]:
    """Fields in which a schedule differs from the named one whose name it bears; none for one of a name of its own."""
    base = SCHEDULES.get(s.name, s)
    return {f.name: getattr(s, f.name) for f in fields(s) if getattr(s, f.name) != getattr(base, f.name)}
