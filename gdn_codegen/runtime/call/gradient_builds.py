"""Chooses the builds of a gradient: one for the states before chunks, and one that walks back."""
from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain
from typing import Any

import torch

from ... import algorithms
from ...derived_pages import beside, find
from ...devices import Cores
from ...host.tensors import _fail
from ...ir.core import Program
from ...ir.decays import by_channel, log_decays
from ...ir.differentiate import derivative
from ...ir.page import Algorithm
from ...ir.stored import PREFIXES, Solved, by_token, inverses, solutions
from ...schedule import Schedule, varied
from ...schedule.contract import Contract
from ...targets import OWN, names
from ...targets import find as find_target
from ...targets.gradient_plans import BY_CHANNELS, ONE_WALK, Varied
from ..admit import Refused, admit
from ..build import Build, lowered
from ..load import module
from ..targets import choose, runs, serving
from . import tables
from .choose import refuse, refused, unfit
from .compiling import DoesNotCompile, compiling
from .device import Facts, facts
from .request import DEFAULT_CHUNK, DTYPES, Call

#: The target whose kernels in pieces of K are taken last. ptxas takes minutes for them: six for one of KDA with K = V = 256.
LAST_IN_PIECES = "tilelang"
#: Tokens of a chunk, tried from the largest that the call allows.
CHUNKS = (128, 64, 32, 16)


@dataclass(frozen=True)
class Builds:
    """The builds of a gradient: the states before chunks, None where the gradient reads none, and the gradient itself."""

    states: Build | None
    gradient: Build

    @property
    def all(self) -> tuple[Build, ...]:
        """The builds, in the order in which they run."""
        return (*filter(None, [self.states]), self.gradient)

    def for_shared(self, kib: int) -> Builds:
        """Both builds, as Build.for_shared has them."""
        return Builds(self.states and self.states.for_shared(kib), self.gradient.for_shared(kib))


def undecided(b: Build, rounded: bool, solved: Solved = "") -> Builds:
    """The two builds of a gradient with the schedule and chunk of `b`: what they compute, and their contracts.

    b: as for `candidates`. rounded: whether states before chunks have the dtype of q between the two. solved: as for
    GradientPlan.
    """
    states, gradient = (beside(b.algorithm, f"{PREFIXES[solved]}{kind}") for kind in ("states", "gradient"))
    p = find(gradient, b.contract.inputs).trace()
    read, made = [t.name for t in p.role("input") if t.index == "slot" and not t.wide], {t.name for t in p.role("output")}
    kept = tuple((n, b.dtype) for n in read) if rounded else ()
    dtypes = tuple(sorted((*b.contract.dtypes, *kept)))
    first = replace(b.contract, dtypes=tuple(x for x in dtypes if x[0] not in made))
    return Builds(replace(b, algorithm=states, contract=first) if read else None,
                  replace(b, algorithm=gradient, contract=replace(b.contract, dtypes=dtypes)))


def candidates(b: Build, device: str, arch: str, most: int, in_parts: bool = True, saved: bool = False, few: bool = False
               ) -> Iterator[Builds]:
    """Builds of a gradient, the best first. b: with target, page, dtype, K, V and contract. device, arch: type and architecture
    of the device. most: tokens of the largest chunk. in_parts: whether sequences may be split, by lengths of the whole batch.
    saved: whether the call has the states before chunks. few: whether walks are so few that those of pages with a gate for each
    channel are split, too."""
    from ...passes.abi.memory import tile_extent  # all passes: a third of a second that a mere import of the ops does not take
    from ...passes.cut.roles import roles
    page = algorithms.find(b.algorithm).trace()
    channels = by_channel(page)
    if not channels or isinstance(find_target(b.target).lowering.device, Cores):
        b = _with_wide_numbers(b, page)
    solved = {"": True, "solutions": bool(solutions(page)) and not saved, "inverses": bool(inverses(page)) and not saved,
              "operands": channels and not saved, "bounds": channels and not saved and by_token(page) is not page}
    decays = bool(log_decays(page))
    in_parts = in_parts and bool(page.forgets) and (few or not channels)

    def offered(x: Varied, by_channels: str) -> bool:
        """Whether the call may have a schedule. One in parts serves calls that are split. With a gate for each channel only the
        schedule `by_channels` has parts: in others some channels that forget slowly cost more than parts gain."""
        return "partition" not in x[1] or (in_parts and x[0] == (by_channels if channels else x[0]))

    of = roles(find(beside(b.algorithm, "gradient")).trace())
    late = of["solution"] != of["state_solution"]  # otherwise kernels with late sums are the same again
    plans = [x for key in dict.fromkeys((arch, device)) for x in find_target(b.target).gradients.get(key, ())
             if solved[x.solved] and late >= x.late
             and offered(x.gradient, BY_CHANNELS if x.solved in ("operands", "bounds") else "")]
    if any(tile_extent(n, find_target(b.target).lowering.device) != n for n in (b.head_dim_k, b.head_dim_v)):
        plans += [replace(x, gradient=(x.gradient[0], {**x.gradient[1], "padded_pieces": True}), rank=x.rank + 2)
                  for x in plans if "v_block" in x.gradient[1] and not x.arch and "partition" not in x.gradient[1]]
    pairs = [(chunk, x) for chunk in CHUNKS if chunk <= most for x in plans if chunk <= x.most]
    for chunk, plan in sorted(pairs, key=lambda x: (x[1].rank, channels and x[1].gradient[0] != BY_CHANNELS, -x[0],
                                                    not decays and x[1].gradient[0] == ONE_WALK)):
        x = undecided(replace(b, chunk=chunk, arch=plan.arch), plan.narrow, plan.solved)
        back = replace(x.gradient, schedule=_varied(plan.gradient, plan.arch))
        if x.states is None:
            yield Builds(None, back)
            continue
        walks = sorted((y for y in plan.states if offered(y, "operand_walk")),
                       key=lambda y: channels and (y[0] != "operand_walk", "partition" not in y[1]))
        yield from (Builds(replace(x.states, schedule=_varied(y, plan.arch)), back) for y in walks)


def _with_wide_numbers(b: Build, page: Program) -> Build:
    """`b`, whose inputs with one number a token, and their gradients, are in float32; the host casts them. Walks of heads with
    one gate read such inputs themselves, and on Hopper an agent would have to cast them. On cores a short vector of 16-bit
    numbers is less than a copy."""
    numbers = {x for t in page.role("input") if t.dims == ("C",) for x in (t.name, derivative(t.name))}
    return replace(b, contract=replace(b.contract, dtypes=tuple(x for x in b.contract.dtypes if x[0] not in numbers)))


def few_walks(target: str, shape_class: tuple[int, ...], units: int) -> bool:
    """Whether walks of a call are so few that those of pages with a gate for each channel come in parts. units: multiprocessors
    of the device."""
    splits = find_target(target).splits
    # without numbers of the target: walks, to the nearest power of two, that fill at most half of the GPU
    return splits.of_channels(shape_class) if splits else 2 << shape_class[1] <= units


def measured(b: Build, names: tuple[str, ...], shape_class: tuple[int, ...], most: int) -> list[Builds]:
    """Builds of a gradient that the tables of `tune --backward` have for calls of a shape class, the fastest first: pairs of rows
    for the same chunk, measured with gates in float32. names: of the device, from its facts. b, most: as for `candidates`."""
    wanted, inputs = undecided(b, True), algorithms.find(b.algorithm).inputs
    gates = {x for n, _ in b.contract.dtypes if n in inputs for x in (n, derivative(n))}
    wide = {x: replace(x.contract, dtypes=tuple(y for y in x.contract.dtypes if y[0] not in gates)) for x in wanted.all}
    rows = [r for r in tables.rows(names, tables.BACKWARD) if r.about.chunk <= most and r.far(shape_class) <= 1]
    states, gradients = ([(r, replace(x, schedule=r.about.schedule, chunk=r.about.chunk, arch=r.about.arch))
                          for r in rows if r.serves(x, wide[x])] if x else [] for x in (wanted.states, wanted.gradient))
    found = [(g.far(shape_class), g.ms + s.ms, Builds(before, back)) for g, back in gradients for s, before in states
             if g.about.chunk == s.about.chunk]
    return [x for *_, x in sorted(found, key=lambda x: x[:2])]


def _varied(plan: Varied, arch: str) -> str | Schedule:
    name, fields = plan
    return varied(name, arch, **fields) if fields else name


def _apart(x: Builds) -> str:
    """Why one build does not read what the other stores: states before chunks in the other orientation. "" if it does."""
    if x.states is None:
        return ""
    stored, read = ({t.name for t in lowered(b).role(role) if t.index == "slot"}
                    for b, role in ((x.states, "output"), (x.gradient, "input")))
    return "" if stored == read else f"schedule {x.states.plan.name} stores {', '.join(stored)}, not {', '.join(read)}"


def check_target(asked: str) -> None:
    """ValueError for a target without gradients. The package's own all have some. torch.compile cannot trace the search for
    installed ones; the gradient's op refuses these then."""
    if asked in ("auto", *OWN) or torch.compiler.is_compiling():
        return
    if asked in names() and not find_target(asked).gradients:
        _fail("target", repr(asked), f"auto, {', '.join(n for n in names() if find_target(n).gradients)}, which have gradients")


def targets_for(device: str, asked: str) -> list[str]:
    """The targets whose builds may serve the gradient of a call, the preferred one first: the caller's, or all that run here."""
    check_target(asked)
    found = [n for n in serving(device) if find_target(n).gradients and runs(n, device)]
    return found if asked == "auto" and found else [choose(device, asked)]


def builds_for(page: str | Algorithm, call: Call, saved: bool = False) -> Builds:
    """The builds of the gradient of a call of a page. saved: as for `candidates`. ValueError where none fits."""
    x = call.request
    b = _asked(page, x.layout, DTYPES[call.dtype], call.head_dims, call.contract, call.extent.H == call.extent.HV)
    most = DEFAULT_CHUNK if x.chunk is None else max(x.chunk, CHUNKS[-1])
    found = _fitting(b, x.target, facts(call.device), most, call.device, call.extent.shape_class, not x.batch_invariant, saved)
    if not isinstance(found, str):
        return found
    name = page if isinstance(page, str) else page.name
    _fail("target", repr(x.target), f"a target that has a gradient of {name} with K = {b.head_dim_k}, V = {b.head_dim_v} in "
                                    f"{b.dtype} ({found}), or smaller K or V")


@lru_cache(maxsize=256)
def _asked(page: str | Algorithm, layout: str, dtype: str, dims: tuple[int, int], contract: Contract, alone: bool) -> Build:
    """`asked_of` for calls with these properties, computed once."""
    return asked_of(Build("triton", layout=layout, algorithm=page, dtype=dtype, head_dim_k=dims[0], head_dim_v=dims[1],
                          contract=contract), alone)


def asked_of(b: Build, alone: bool) -> Build:
    """What the gradient of a build's calls computes, as `candidates` takes it. alone: a key head has one value head.

    States lie as the pages have them, in float32: the gradient makes of them what the caller has. Gradients of inputs of key
    heads are in float32 where they are summed over value heads. Others have the dtypes of inputs."""
    inputs = [y for y in algorithms.find(b.algorithm).trace().role("input") if y.index == "token"]
    rows = {derivative(y.name): b.dtype for y in inputs if alone and y.heads == "H" and not y.wide and len(y.dims) > 1}
    for name, dtype in b.contract.dtypes:
        if any(y.name == name and y.heads == "HV" for y in inputs):
            rows |= {name: dtype, derivative(name): dtype}
    return replace(b, contract=replace(b.contract.unpromised(), dtypes=tuple(sorted(rows.items())), state_layout="kv",
                                       state_dtype="float32"))


@lru_cache(maxsize=256)
def _fitting(b: Build, asked: str, on: Facts, most: int, device: Any, shape_class: tuple[int, ...], in_parts: bool,
             saved: bool) -> Builds | str:
    """The first builds that fit: those that were measured, then those of the target's plans. Kernels of
    LAST_IN_PIECES in pieces come last. Where none fits, why not: each call of such a kind asks again.

    b, most, in_parts, saved: as for `candidates`, of any target. Tables are by the size of the batch, too. asked: the call's
    target. on: what dispatch knows of the device."""
    last: Builds | None = None
    why: dict[tuple[str, int], str] = {}  # of a target's chunks, why the preferred plan does not fit
    for target in targets_for(device.type, asked):
        mine = replace(b, target=target)
        known = measured(mine, on.names, shape_class, most) if in_parts else []
        few = few_walks(target, shape_class, on.units)
        planned = (x.for_shared(on.shared_kib) for x in candidates(mine, device.type, on.arch, most, in_parts, saved, few))
        for found in chain(known, planned):
            against = [unfit(y) or refused(y, device) for y in found.all]
            against += [] if any(against) else [_apart(found)]
            if not any(against):
                pieces = (o.attr("piece") for k in lowered(found.gradient).kernels for o in k.ops)
                if asked == target or target != LAST_IN_PIECES or not any(pieces):
                    return found
                last = found
                break
            why.setdefault((target, found.gradient.chunk), next(filter(None, against)))
    if last:
        return last
    which = "no target here has" if asked == "auto" else f"{asked} has no plans of"
    return [f"{which} gradients on {device.type}", *why.values()][-1]


def modules_for(page: str | Algorithm, call: Call, saved: bool = False) -> tuple[Any, Any]:
    """The modules of the gradient of a call, after admission: states before chunks, None where the gradient reads none, and
    the gradient. saved: as for `candidates`. A build that is refused on the device, or that does not compile, is passed over; its
    warning says so. ValueError where none is left."""
    while True:
        builds, made = builds_for(page, call, saved), dict[Build | None, Any]()
        for b in builds.all:
            m = module(b)
            try:
                with compiling(m, call.device.type):
                    admit(b, m, call, lambda: None)
            except (Refused, DoesNotCompile) as e:
                if not refuse(b, call.device, str(e)):
                    raise
                warnings.warn(f"{e}. Gradients take another build", RuntimeWarning, stacklevel=2)
                _fitting.cache_clear()
                break
            made[b] = m
        else:
            return made.get(builds.states), made[builds.gradient]
