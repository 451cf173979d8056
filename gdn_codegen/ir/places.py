"""places: checks where the tiles of a tensor lie in memory, which columns ops move, and which use counters or places, for
`verify`."""
from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import takewhile

from .core import Kernel, Loop, Op, Program
from .types import Tensor

#: Index of a tensor with `at` -> the indices of the tensors at whose integers its tiles may lie.
AT = {"sequence": ("number", "numbers"), "checkpoint": ("number", "numbers"), "numbers": ("number",)}


def misplaced(p: Program, t: Tensor) -> Iterator[str]:
    """An error text for each of the fields `at`, `over` and `cleared` of a tensor that is wrong."""
    by_name = {x.name: x for x in p.tensors}
    if t.at and (t.index not in AT or t.at not in by_name or by_name[t.at].index not in AT[t.index]):
        yield (f"tensor {t.name}, index {t.index}, lies at {t.at!r}; accepted: "
               + ", ".join(f"{index} at {' or '.join(places)}" for index, places in AT.items()))
    if t.over:
        under = by_name.get(t.over)
        if t.role != "output" or under is None or not _alike(t, under):
            yield f"output {t.name} lies over {t.over!r}, which is not an input like it"
    if t.cleared and (t.role != "output" or t.index != "token"):
        yield f"tensor {t.name} is cleared; only an output of tokens has rows that no sequence covers"


def has_columns(p: Program, t: Tensor, o: Op) -> bool:
    """Whether the rows of the tiles of `t` have the columns that a load or store moves."""
    first, size = o.attr("piece")
    size = p.sizes[size] if isinstance(size, str) else size
    return bool(t.dims) and not o.attr("heads") and not o.attr("last") and 0 <= first < first + size <= t.tile.shape(p.sizes)[-1]


def can_be_delayed(t: Tensor, o: Op) -> bool:
    """Whether a load of `t` may begin some tokens before the chunk: of a tile of tokens, as it lies."""
    changed = ("transposed", "described", "one_token", "channel")
    return t.index == "token" and len(t.dims) == 2 and not any(o.attr(x) for x in changed)


def takes_columns(p: Program, k: Kernel, lp: Loop) -> bool:
    """Whether a loop over columns takes pieces of K, in a kernel over chunks, and has no loop inside."""
    moved = {o.attr("piece") for o in lp.ops if o.attr("piece")}
    return k.grid == "chunks" and {**p.sizes, **k.sizes}["K"] % lp.step == 0 and moved <= {(0, lp.step)} and lp.ops == lp.body


def miscounted(p: Program) -> Iterator[str]:
    """An error text for each counter that the program does not use as it must. Either one kernel claims items from it, in a loop
    over items, and an earlier kernel clears it. Each agent of a kernel that claims items goes on with them. Or it says that the
    first of two builds declined a call. In that one a kernel clears it, a later one sets it, and all after that end if it is set.
    In the other one all kernels end if it is zero. They end before they write other memory."""
    for t in p.tensors:
        if t.index != "counter":
            continue
        uses = {kind: [n for n, k in enumerate(p.kernels) for o in k.ops if (o.kind, o.attr("tensor")) == (kind, t.name)]
                for kind in ("clear_counter", "claim_item", "set_if_negative", "return_if_set", "return_if_zero")}
        cleared, claimed, is_set, by_set, by_zero = uses.values()
        if is_set or by_set or by_zero:
            every = [*range(len(p.kernels))]
            first = len(cleared) == len(is_set) == 1 and cleared < is_set and by_set == every[is_set[0] + 1:] and not by_zero
            if claimed or not (first or (by_zero == every and not (cleared or is_set or by_set))):
                yield (f"counter {t.name} is cleared by kernels {cleared} and set by {is_set}; {by_set} end if it is set, and "
                       f"{by_zero} if it is zero; accepted: all of {every} if it is zero, or if it is set those after one that "
                       "sets it, which comes after one that clears it")
            for k in p.kernels:
                before = list(takewhile(lambda s: not isinstance(s, Op) or s.attr("tensor") != t.name, k.body))
                if len(before) < len(k.body) and any(isinstance(s, Loop) or s.kind == "store" for s in before):
                    yield f"kernel {k.name} ends by {t.name} after it writes other memory; accepted: before"
        elif len(cleared) != 1 or len(claimed) != 1 or cleared >= claimed:
            yield (f"counter {t.name} is cleared by {len(cleared)} ops, and {len(claimed)} claim items from it; accepted: one, "
                   "and one of a later kernel")
    for k in p.kernels:
        claims = {o.attr("tensor"): o for o in k.ops if o.kind in ("claim_item", "next_item")}
        inside = {x for s in k.body if isinstance(s, Loop) and s.index == "item" for x in s.body}
        follow = [o.agent for o in k.ops if o.kind == "next_item"]
        if not set(claims.values()) <= inside or (claims and sorted(follow) != sorted(a.name for a in k.agents)):
            yield (f"kernel {k.name} goes on with claimed items for {', '.join(follow) or 'no agent'}; accepted: once for each "
                   "agent, in a loop over items")
        for name in claims.keys() - {None}:
            if name not in (x.name for x in p.tensors if x.index == "counter"):
                yield f"kernel {k.name} claims items from {name}, which is no counter"


def unplaced(p: Program) -> Iterator[str]:
    """An error text unless the first kernel alone chooses the places of parts, over chunks, and all kernels over parts read them,
    or nothing does either."""
    of = {t.name for t in p.tensors if t.index == "places"}
    chosen = [(n, o.attr("tensor")) for n, k in enumerate(p.kernels) for o in k.ops if o.kind == "choose_parts"]
    read = {k.name: k.places for k in p.kernels if k.places or (of and k.grid == "parts")}
    ends = [k.name for k in p.kernels for o in k.ops if o.kind == "return_unless_split" and not k.places]
    right = len(of) == 1 and p.kernels[0].grid == "chunks" and chosen == [(0, *of)] and set(read.values()) == of
    if ends or ((of or chosen or read) and not (right and all(k.grid == "parts" for k in p.kernels if k.places))):
        yield (f"places {', '.join(sorted(of)) or 'of no tensor'} are chosen by kernels {chosen} and read by {read}; accepted: "
               "the first one, over chunks, chooses them, and all over parts read them"
               + (f"; {ends} end without them" if ends else ""))


def _alike(t: Tensor, under: Tensor) -> bool:
    """Whether the tiles of `t` are those of the tensor that it overwrites. Tiles after chunks are slots of a pool, too."""
    if t.index == "checkpoint" and t.at and under.index == "sequence":
        t = replace(t, index=under.index)
    return replace(t, name=under.name, role=under.role, over="") == under
