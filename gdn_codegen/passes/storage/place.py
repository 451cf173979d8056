"""place: decides which values have buffers. For TileLang and Triton; `rings` has done so for kernels with several agents.

A value without a buffer is an expression inside its reader (`stored_values`). Other values get a buffer in the space that the
device names for their kind. Where it allows that (`in_place`), values share one if no later op reads the old (`shared_buffers`):
- a product and its accumulator, or a carried value and its next value;
- the inverse of a whole tile, or running sums of its columns, and that tile;
- values of the same shape and dtype in a limited space that are never live at the same time.

A kernel over chunks without products gets the order of `by_stores` if fewer fragments are live so. One with products waits for
its loads, unless another block on the multiprocessor computes meanwhile. Where its tiles leave no room for two blocks, it gets
another order (`few_live`, or else `late`), if two fit so, with registers for their fragments, and otherwise that of `late` if
fewer fragments are live so. Where two fit anyway, it gets the order of `late` unless more are live so; then only its loads move
(`late_loads`). Where its tiles do not fit, it gets that of `few_live`, computes operands again, or has pieces of K's columns.
"""
from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from math import prod

from ...devices import Device
from ...ir.core import NO_LINE, Buffer, Kernel, Line, Loop, Op, Program, Stmt, map_ops, walk
from ...ir.types import BYTES
from ...schedule.schedule import Schedule, ScheduleError
from ..loops.column_pieces import pieces_of_k
from ..loops.early_loads import early_loads, late_loads
from ..loops.few_live import by_stores, few_live, late
from ..stage import takes
from .buffer_names import named
from .live_bytes import ALIGNMENT, live_bytes, most_of_two, packed_bytes, two_fit
from .padded_tiles import with_pads
from .recompute import recompute
from .shared_buffers import share_accumulators, share_carried, share_groups, share_storage, sums_over
from .stored_values import StoredValues, over

#: Bytes of fragments of a block, with which two blocks of 256 threads have enough registers. On an H100 a kernel over chunks at
#: the end of a gradient of Gated DeltaNet, with 96 registers of fragments for each thread, took 791 us so, and 698 as one block
#: (1 x 32768, 16 heads). The order of `late` may take as many, and half as many more if the page's order has equally many, or
#: else that of `few_live`: with 176 registers GDN-2's last kernel takes 2121 us as two blocks, 1924 as one (H200, this shape).
#: KDA's takes 1104 us as two with 136, and 1392 as one with 160 and more threads (8192 tokens, 64 heads).
FRAGMENTS_OF_TWO = 96 * 256 * BYTES["float32"]


@takes("assigned", gives="placed")
def place(p: Program, s: Schedule, device: Device) -> Program:
    """`p` with buffers on its kernels and on the ops that fill them. Raises ScheduleError if a space is too small."""
    return p.map_kernels(lambda k: k if k.agents else _with_room(p, s, k, device))


def _with_room(p: Program, s: Schedule, k: Kernel, device: Device) -> Kernel:
    """The kernel with buffers, in an order for which shared memory has room, for two blocks if possible."""
    limit = device.spaces.get("shared", 0)
    if not limit or k.grid != "chunks":
        return _placed(p, k, device)
    sizes = {**p.sizes, **k.sizes}
    if not any(o.kind == "matmul" for o in k.ops) and not any(isinstance(x, Loop) for x in k.body):
        both = _placed(p, k, device), _attempt(p, by_stores(k), device)
        return min((x for x in both if isinstance(x, Kernel)), key=_fragments)
    first, calm, few = _attempt(p, k, device), *(_attempt(p, f(k, sizes), device, merged=True) for f in (late, few_live))
    if isinstance(first, ScheduleError):
        return _crowded(p, s, k, device, first)
    calmer = calm if isinstance(calm, Kernel) and _fragments(calm) < _fragments(first) else None
    most = min(_fragments(first), 3 * FRAGMENTS_OF_TWO // 2)
    tried = ((few, FRAGMENTS_OF_TWO - 1), (calm, FRAGMENTS_OF_TWO), (calm, 0 if calmer else most), (few, most))
    for x, bound in ((calm, _fragments(first)),) if two_fit(first, device) else tried:
        if isinstance(x, Kernel) and two_fit(x, device) and _fragments(x) <= bound:
            return early_loads(x, most_of_two(device), device)
    if two_fit(first, device):
        return early_loads(late_loads(first), most_of_two(device), device)
    return early_loads(calmer, limit - ALIGNMENT, device) if calmer else first


def _crowded(p: Program, s: Schedule, k: Kernel, device: Device, why: ScheduleError) -> Kernel:
    """The kernel with buffers, in the order of few live tiles, with operands computed again or in pieces of K if need be. Raises
    `why` if its tiles do not fit then."""
    sizes = {**p.sizes, **k.sizes}
    forms: tuple[Callable[[], Iterable[Kernel]], ...] = (lambda: [k], lambda: [recompute(k)], lambda: pieces_of_k(p, k, s))
    tried = (_attempt(p, few_live(x, sizes), device, merged=True) for form in forms for x in form())
    if (x := next((x for x in tried if isinstance(x, Kernel)), None)) is None:
        raise why
    return early_loads(x, most_of_two(device) if two_fit(x, device) else device.spaces["shared"] - ALIGNMENT, device)


def _fragments(k: Kernel) -> int:
    """The bytes of fragments that are live at once."""
    return live_bytes(k, "fragment")


def _attempt(p: Program, k: Kernel, device: Device, merged: bool = False) -> Kernel | ScheduleError:
    """The kernel with buffers, or why a space is too small for them. merged: as for `_placed`."""
    try:
        return _placed(p, k, device, merged)
    except ScheduleError as e:
        return e


def with_buffers(body: tuple[Stmt, ...], owner: dict[str, str]) -> tuple[Stmt, ...]:
    """The body with buffers on its ops. owner: value -> the name of its buffer.

    A cast or move gets the line of the expression under it, or none if it copies what is in a buffer. So no comment stands over a
    copy of another statement's value.
    """
    defs = {o.out: o for o in walk(body)}

    def line(o: Op) -> Line:
        while o.kind in ("cast", "move"):
            if o.args[0] not in defs or o.args[0] in owner:
                return NO_LINE
            o = defs[o.args[0]]
        return o.line

    return map_ops(body, lambda o: [o.changed(buffer=owner.get(o.out, ""), line=line(o))])


def _placed(p: Program, k: Kernel, device: Device, merged: bool = False) -> Kernel:
    """The kernel with a buffer for each value that needs storage. Values share buffers where one may overwrite another. merged:
    whether buffers of different shapes may lie at one place. TileLang's compiler merges shared memory so, by lifetimes."""
    v = StoredValues(p, k, device)
    owner = {o.out: o.out for o in v.ops if o.out and v.stored(o)}
    share_carried(v, k, owner)
    if device.in_place:
        owner |= {o.args[1]: owner[o.out] for o in v.ops if o.kind == "load" and o.args[1:]}
        share_accumulators(v, owner)
        share_groups(v, k, owner)
        owner |= {o.args[0]: o.out for o in v.ops if over(o, device) or sums_over(v, o, owner)}
        share_storage(v, k, owner)
    buffers: dict[str, Buffer] = {}
    for value, name in owner.items():
        if name not in buffers:
            t = v.type[value]
            buffers[name] = Buffer(name, v.space(name if name in v.defs else value), t.shape(v.sizes), t.dtype, dims=t.dims)
    placed = replace(k, body=with_buffers(k.body, owner), buffers=tuple(buffers.values()))
    _check_sizes(p, placed, device, merged)
    return named(placed)


def _check_sizes(p: Program, k: Kernel, device: Device, merged: bool) -> None:
    """Raise ScheduleError if the buffers of a limited space do not fit it together, or if those of it and of "staged", which the
    target's compiler puts there too, do not as it packs and aligns them."""
    sizes: dict[str, dict[str, int]] = {}
    for b in k.buffers:
        sizes.setdefault(b.space, {})[b.name] = BYTES[b.dtype] * prod(b.shape)
    for space, each in sizes.items():
        limit = device.spaces.get(space, 0)
        least = packed_bytes(with_pads(k, device)) + ALIGNMENT if space == "shared" else 0
        if limit and (total := max(0 if merged else sum(each.values()), least)) > limit:
            each |= sizes.get("staged", {})
            most = sorted(each.items(), key=lambda x: -x[1])
            said = f"{total} are needed: {', '.join(f'{n} {size}' for n, size in most)}"
            raise ScheduleError(f"{p.name}, kernel {k.name}: {space} of {device.name} has {limit} bytes, {said}")
