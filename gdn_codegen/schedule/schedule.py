"""Schedules, as data: which values become the results of a kernel, in which form, and with which options for the device."""
from __future__ import annotations

import re
from dataclasses import dataclass, fields, replace
from typing import Any

from ..ir.core import Op, Program
from .agents import ASSIGNMENTS

FORMS = ("direct", "wy", "gate-free", "split", "unit")
#: Roles of a page's values. Groups name them with an @. `passes/cut/roles.py` defines them.
ROLES = ("output", "state", "gate", "gate_sum", "system", "inverse", "weight", "offset", "solution", "state_solution",
         "right_side", "operand", "keyed", "update", "pair", "summand", "factor", "score", "late_score", "keyless", "early",
         "early_keyless", "sum", "tile", "converted", "normed", "elementwise", "keyless_elementwise", "core", "stateless",
         "stateless_keyed")
INVERSES = ("substitution", "doubling")
STATE_LAYOUTS = ("kv", "vk")
LAUNCHES = ("kernels", "single")
ORDERS = ("page", "list")
PREFETCHES = ("no", "operands", "loads", "all")
WARM_UPS = ("all", "state")
PARTITIONS = (None, "exact", "decay", "short", "pipelined")

#: Fields for cores that share no memory.
OF_CORES = ("cache_masks", "inverse_block", "order", "prefetch", "channel_slots", "l0_slots", "v_piece", "walk_piece")

#: Fields that accept one of a few values.
CHOICES: dict[str, tuple[Any, ...]] = {
    "form": FORMS, "inverse": INVERSES, "launch": LAUNCHES, "partition": PARTITIONS,
    "order": ORDERS, "prefetch": PREFETCHES, "channel_slots": (1, 2), "l0_slots": (1, 2), "state_layout": STATE_LAYOUTS,
    "stages": (1, 2, 3, 4, 5, 6, 7, 8), "warm_up": WARM_UPS, "warps": (0, 1, 2, 4, 8, 16), "value_heads": (0, 1, 2, 4),
    "k_piece": (0, 16, 32, 64), "walk_piece": (0, 16, 32, 64), "piece_warps": (0, 1, 2, 4, 8),
    "inverse_block": (0, 16, 32, 64), "cache_masks": (False, True), "longest_first": (False, True),
    "token_groups": ("early", "late"), "descriptors": (False, True), "persistent": (False, True),
    "narrow_workspaces": (False, True), "by_length": (False, True), "padded_pieces": (False, True), "if_declined": (False, True),
    "shared_kib": (0, 163, 99)}


class ScheduleError(ValueError):
    """A schedule that does not fit the page or the device, or whose fields contradict each other."""


@dataclass(frozen=True)
class Schedule:
    """How a page becomes kernels.

    name: letters, digits and _. It is part of file names.
    kernels: groups of values. One group is one kernel, which writes these values to global memory. Later groups read them.
      A value that no group names is computed where it is needed. A group names a value as the page does ("G"), or all values of
      a role ("@gate_sum"; ROLES). Roles serve any page: a role without values is ignored, and so is a value of a role that no
      later group reads and that is no output or state. A named value must exist on the page.
    form: how products with an inverse are computed (docs/schedules.md). "direct": as the page is written. "wy": the
      factor of the state (@weight) and the rest (@offset) are separate values. "split": two products with the scaled inverse,
      one of which does not depend on the state. "unit": the ones on the inverse's diagonal are a float32 sum, and the rest is
      a product. "gate-free": the inverse is computed without decay. In a generic schedule, every form means
      "direct" for a page without an inverse.
    state_layout: "kv", or "vk": walks hold tiles whose last dim is V transposed.
    inverse: "doubling" merges blocks of 1, 2, 4... rows. "substitution" starts from blocks that the device solves directly.
    v_block: columns of V per instance, for kernels whose results all have V. 0 is 64 in Triton's walks and V elsewhere.
    k_block: columns of K per instance, for kernels over chunks whose results all have K and that sum nothing over K. 0 is K.
    k_piece: columns of K that kernels over chunks with products over K take at a time, in a loop (Triton). 0 is K.
    v_piece: columns of V that kernels over chunks with sums over V take at a time, one piece after another (PTO). 0 is V.
    walk_piece: columns of V of each of several states that a walk has side by side, so that one is computed while another crosses
      between the cores (PTO). 0 is V.
    padded_pieces: kernels over chunks take pieces of columns also where tiles have padding.
    launch: "kernels", or "single": one launch, with barriers over the device between kernels (PTO).
    partition: how a long sequence is split into parts. They run side by side: "exact" computes each part's initial state from
      summaries; "decay" uses a warm-up, and summaries where the state decays slowly; "short" uses a warm-up of at most 128
      tokens, and declines calls that need a longer one, which another build with `if_declined` then computes. Or they run one
      after the other: "pipelined" launches the kernels once for each part, so that the first one, over chunks of the next part,
      runs beside the walk of this one (Hopper under TileLang). None does not split.
    part_chunks: chunks of a part. 0 leaves it to the host's cost model; "pipelined" then makes three parts, of 16 chunks or more.

    value_heads: value heads that one instance of a chunk-parallel kernel with products handles. 0 is the device's number.
      TileLang: heads of one key head, so that the number must divide HV / H; 0 is 1. PTO: consecutive heads whose ops alternate,
      as many of them as the chip has room for; 0 is 2.

    For cores that share no memory (PTO), as far as the chip has room:
    cache_masks: load masks once per core group, not once per instance.
    inverse_block: invert diagonal blocks of this size (32, 64) separately where a chunk has two of them. 16: invert blocks of
      16 rows as a stack and merge them pair by pair, so that tiles stay with the core that multiplies (16 bits; in float32 half a
      chunk). 0: whole tiles.
    order: "page" (the page's order) or "list" (list scheduling by the device's rates).
    prefetch: what a walk does one chunk ahead: "no", "operands" (loads that products read), "loads", or "all" (all ops that do
      not depend on a state).
    channel_slots: tiles of a workspace between cores, used in rotation.
    l0_slots: operands that each of L0A and L0B holds at a time.

    For warp groups (Hopper under TileLang) and Triton:
    stages: iterations that loads may run ahead of their readers.
    warm_up: what a walk computes in a warm-up: "all", or "state" (only ops that lead to the state).
    longest_first: start parts whose warm-up is longer than half a part before the others.
    warps: warps per instance, counted in 32 threads; 0 chooses by the largest tile (Triton).
    piece_warps: the same for kernels that take pieces of K (`k_piece`); 0 chooses by the sums that they hold (Triton).
    agents: the assignment that says which warp group computes what (`gdn_codegen.schedule.agents`): walk, solving_walk, or one
      that you registered. "" takes the first of these two that has an agent for each task of a walk.
    token_groups: when a walk over single tokens computes what depends on tokens alone, for the first few of them: "early", while
      the initial state is loaded, or "late", after that (TileLang for any GPU).
    descriptors: walks read whole rows, such as those of q, by tensor descriptors (Triton; TMA on Hopper).
    persistent: a block takes one walk after another, and loads for the next one while it ends the current one (Hopper under
      TileLang).
    by_length: walks of the longest sequences start first, so that no long one is still under way when the others have ended
      (Hopper under TileLang, without a partition).
    narrow_workspaces: tiles between kernels have the operands' dtype, also where elementwise ops read them. They are rounded once
      more, and take half the memory (all targets).
    if_declined: kernels end at once unless a build with partition="short", which ran before, has declined the call (Hopper under
      TileLang). Such a pair makes one call of an op. Neither runs alone.
    shared_kib: KiB of shared memory that a block of threads may take (TileLang): 163 as on an A100, 99 as on GPUs of compute
      capability 8.6, 8.9 and 12.0. 0: what an H100 has, 227.
    residuals: values, by names or roles with commas between them, that products read in two parts: rounded to the operands'
      dtype, and what that leaves. Such an operand has twice the digits, and each of these products is two (all targets; nothing
      changes in float32).

    Raises ScheduleError, a ValueError.
    """

    name: str
    kernels: tuple[tuple[str, ...], ...]
    form: str = "direct"
    inverse: str = "substitution"
    v_block: int = 0
    k_block: int = 0
    k_piece: int = 0
    v_piece: int = 0
    walk_piece: int = 0
    padded_pieces: bool = False
    launch: str = "kernels"
    partition: str | None = None
    part_chunks: int = 0
    cache_masks: bool = True
    order: str = "list"
    inverse_block: int = 16
    prefetch: str = "no"
    channel_slots: int = 1
    l0_slots: int = 2
    state_layout: str = "kv"
    stages: int = 2
    warm_up: str = "all"
    longest_first: bool = False
    warps: int = 0
    piece_warps: int = 0
    value_heads: int = 0
    agents: str = ""
    descriptors: bool = False
    token_groups: str = "early"
    persistent: bool = False
    by_length: bool = False
    narrow_workspaces: bool = False
    if_declined: bool = False
    shared_kib: int = 0
    residuals: str = ""

    def __post_init__(self) -> None:
        """Makes `kernels` a tuple of tuples. ScheduleError for a wrong value, and for fields that contradict each other."""
        if not (isinstance(self.name, str) and re.fullmatch("[A-Za-z0-9_]+", self.name)):
            raise ScheduleError(f"schedule: got the name {self.name!r}; accepted: letters, digits and _ of ASCII")
        groups = self.kernels
        if not isinstance(groups, (list, tuple)) or not all(isinstance(g, (list, tuple)) for g in groups) \
                or not all(isinstance(n, str) for g in groups for n in g):
            raise ScheduleError(f"schedule {self.name}: kernels={groups!r}; accepted are groups of names, as "
                                "(('G',), ('o', 'S')), and of roles, as (('@gate_sum',), ('@output', '@state'))")
        object.__setattr__(self, "kernels", tuple(map(tuple, groups)))  # lists cannot be hashed
        for field, accepted in CHOICES.items():
            value = getattr(self, field)
            if not any(type(value) is type(x) and value == x for x in accepted):
                raise ScheduleError(f"schedule {self.name}: {field}={value!r}; accepted are {', '.join(map(str, accepted))}")
        for field in ("v_block", "k_block", "v_piece", "part_chunks"):
            value = getattr(self, field)
            if type(value) is not int or value < 0:
                raise ScheduleError(f"schedule {self.name}: {field}={value!r}; accepted are whole numbers from 0")
        if self.part_chunks and not self.partition:
            raise ScheduleError(f"schedule {self.name}: part_chunks={self.part_chunks}; accepted are 0 and, with a partition, "
                                "whole numbers from 1")
        if self.longest_first and self.partition != "decay":
            raise ScheduleError(f"schedule {self.name}: longest_first=True; accepted only with partition='decay'")
        if self.persistent and self.partition:
            raise ScheduleError(f"schedule {self.name}: persistent=True with partition={self.partition!r}; accepted only without "
                                "a partition")
        if self.if_declined and (self.persistent or self.partition == "short"):
            raise ScheduleError(f"schedule {self.name}: if_declined=True with partition={self.partition!r} and "
                                f"persistent={self.persistent}; accepted only without 'short' and persistent")
        if self.by_length and self.partition:
            raise ScheduleError(f"schedule {self.name}: by_length=True with partition={self.partition!r}; accepted only without "
                                "a partition")
        if self.agents != "" and self.agents not in ASSIGNMENTS:
            raise ScheduleError(f"schedule {self.name}: agents={self.agents!r}; accepted are {', '.join(ASSIGNMENTS)}, or '' for "
                                "one that fits")
        names = [n for group in self.kernels for n in group]
        twice = sorted({n for n in names if names.count(n) > 1})
        if twice:
            raise ScheduleError(f"schedule {self.name}: {', '.join(twice)} is twice in kernels; accepted: once")
        if not all(self.kernels):
            raise ScheduleError(f"schedule {self.name}: kernels has an empty group")
        alone = {g[0] for g in self.kernels if len(g) == 1}
        roles = ", ".join(f"@{r}" for r in ROLES)
        unknown = [n for n in names if n.startswith("@") and n[1:] not in ROLES
                   and not (n in alone and n[1:-1] in ROLES and n[-1] in "*+")]
        if unknown:
            raise ScheduleError(f"schedule {self.name}: kernels has {', '.join(unknown)}, which is no role; accepted are "
                                f"{roles}, in a group of its own also with a * or + at its end, and a page's values by their "
                                "names")
        chosen = self.residuals.split(",") if isinstance(self.residuals, str) else [""]
        if self.residuals != "" and not all(n[1:] in ROLES if n.startswith("@") else n.isidentifier() for n in chosen):
            raise ScheduleError(f"schedule {self.name}: residuals={self.residuals!r}; accepted are {roles}, and a page's values "
                                "by their names, with commas between them and no spaces")

    @property
    def generic(self) -> bool:
        """Whether a group names a role, so that the schedule serves any page."""
        return any(n.startswith("@") for group in self.kernels for n in group)

    @property
    def warms_up(self) -> bool:
        """Whether walks of parts may start with a warm-up, whose length follows from the gates."""
        return self.partition in ("decay", "short")

    @property
    def in_turns(self) -> bool:
        """Whether warps of an agent run iterations of the walk in turn (`AgentPlan.in_turns`)."""
        return bool(self.agents) and any(a.in_turns for a in ASSIGNMENTS[self.agents].agents)

    def adapted(self, p: Program) -> Schedule:
        """This schedule for a page: in a generic schedule the form becomes "direct" if the page has no inverse. p: traced."""
        inverts = any(isinstance(o, Op) and o.kind == "unit_lower_inverse" for o in p.walk.body)
        return self if inverts or not self.generic else replace(self, form="direct")


PREPARED = (("@gate_sum", "@system"), ("@weight", "@offset"), ("@state", "@solution"), ("@output",))
REPLAYED = (("@gate_sum", "@inverse"), ("@output", "@state"))
BEFORE_BACK = ("@gate_sum", "@inverse", "@weight", "@offset", "@summand")  # of a gradient, before it walks back
SCHEDULES = {s.name: s for s in (
    Schedule("staged", (("@gate_sum",), ("@system",), ("@inverse",), *PREPARED[1:]), form="wy", walk_piece=64),
    Schedule("prepared", PREPARED, form="wy", value_heads=1, walk_piece=64),  # two heads would need more flags than PTO has
    Schedule("prepared_vk", PREPARED, form="wy", value_heads=1, walk_piece=64, state_layout="vk"),
    Schedule("replay", REPLAYED),
    Schedule("walk", REPLAYED, form="split", state_layout="vk", warm_up="state"),
    Schedule("fused", (("@output", "@state"),), prefetch="all"),
    Schedule("operand_walk", (("@gate_sum", "@operand"), ("@output", "@state")), form="split", state_layout="vk",
             warm_up="state"),
    Schedule("fused_walk", (("@gate_sum", "@gate"), ("@output", "@state")), form="split", state_layout="vk", stages=3,
             warm_up="state"),
    Schedule("walk_in_turn", (("@output", "@state"),), form="split", state_layout="vk", warm_up="state"),
    Schedule("gradient", ((*BEFORE_BACK, "@converted"), ("@state", "@solution"), ("@core",), ("@output",)), state_layout="vk",
             narrow_workspaces=True),
    Schedule("operand_gradient", ((*BEFORE_BACK, "@early", "@operand"), ("@state", "@solution"), ("@output",)), state_layout="vk",
             narrow_workspaces=True),
    Schedule("fused_gradient", ((*BEFORE_BACK[:-1], "@converted"), ("@state", "@core", "@early"), ("@output",)),
             state_layout="vk", narrow_workspaces=True, warm_up="state"),
    Schedule("channel_gradient", (("@converted",),
                                  ("@gate_sum", "@inverse", "@summand", "@factor", "@early_keyless", "@operand"),
                                  ("@weight", "@offset", "@score"), ("@state", "@solution"), ("@early",),
                                  ("@late_score", "@keyless", "@keyless_elementwise"), ("@elementwise", "@core"),
                                  ("@output+",)),
             state_layout="vk", k_block=64, narrow_workspaces=True),
)}

#: Variants of named schedules for one architecture (`--arch`): (name, architecture) -> schedule. On sm_90a threads read a
#: tile of tokens transposed from shared memory. They subtract a product with the state from it, which saves another product.
VARIANTS: dict[tuple[str, str], Schedule] = {
    ("walk", "sm_90a"): replace(SCHEDULES["walk"], form="unit",
                                kernels=(("@gate_sum", "@inverse", "@gate"), ("@output", "@state"))),
    ("operand_walk", "sm_90a"): replace(SCHEDULES["operand_walk"], form="unit", agents="operand_walk",
                                        kernels=(("@gate_sum", "@operand", "@gate"), ("@output", "@state"))),
    ("fused_walk", "sm_90a"): replace(SCHEDULES["fused_walk"], form="unit"),
    ("walk_in_turn", "sm_90a"): replace(SCHEDULES["walk_in_turn"], form="unit", agents="four_in_turn", stages=8),
    ("fused_gradient", "sm_90a"): replace(SCHEDULES["fused_gradient"], agents="fused_gradient", stages=1)}


def named(name: str, arch: str = "") -> Schedule:
    """The schedule called `name`. arch: the architecture to build for, such as "sm_90a", which may have a variant of its own; ""
    for none. Raises ScheduleError if no schedule has that name."""
    if name not in SCHEDULES:
        raise ScheduleError(f"schedule: got {name!r}; accepted: {', '.join(SCHEDULES)}")
    return VARIANTS.get((name, arch), SCHEDULES[name])


def spelled(value: Any) -> str:
    """The value of a field as `--set` accepts it: a number, a name, or groups such as @gate_sum,@inverse/o,S."""
    return "/".join(map(",".join, value)) if isinstance(value, tuple) else f"{value:d}" if isinstance(value, int) else str(value)


def varied(name: str, arch: str = "", **changes: Any) -> Schedule:
    """The schedule called `name` with changed fields. arch: as for `named`. changes: field -> value."""
    return replace(named(name, arch), **changes)


def changes(s: Schedule, arch: str = "") -> dict[str, Any]:
    """The fields in which `s` differs from the named schedule of the same name. Empty if no named schedule has that name.

    arch: as for `named`."""
    base = named(s.name, arch) if s.name in SCHEDULES else s
    return {f.name: getattr(s, f.name) for f in fields(s) if getattr(s, f.name) != getattr(base, f.name)}
