"""early_loads: hoists loads within a kernel over chunks, so that they arrive while other ops run. `place` calls it after
`few_live`, `late` or `late_loads`, which bring loads late, each directly before what needs it."""
from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ...devices import Device
from ...ir.core import Kernel, Op, map_ops
from ..storage.buffer_names import named
from ..storage.live_bytes import packed_bytes
from ..storage.padded_tiles import with_pads
from ..uses import stored_under


def late_loads(k: Kernel) -> Kernel:
    """`k` with each load directly before the first op that reads it. `k` itself if its body has a loop."""
    if k.body != k.ops:
        return k
    ops, loads = [o for o in k.ops if o.kind != "load"], {o.out: o for o in k.ops if o.kind == "load"}
    body: list[Op] = []
    for o in ops:
        body += [x for n in dict.fromkeys(o.args) if (x := loads.pop(n, None))]
        body.append(o)
    assert not loads, sorted(loads)
    return replace(k, body=tuple(body))


def early_loads(k: Kernel, limit: int, device: Device) -> Kernel:
    """`k`, a kernel over chunks with buffers, whose loads come as early as `limit` bytes of tiles in shared memory allow. Loads
    keep their order. A load stays after all that reads or fills its buffer. It gets its own buffer if it comes earlier so. `k`
    itself if its body has a loop."""
    if k.body != k.ops:
        return k
    least = 0
    for name in [o.out for o in k.ops if o.kind == "load" and o.buffer]:
        at, k = min(_attempts(k, name, least, limit, device), key=lambda x: x[0])
        least = at + 1
    return named(k)


def _attempts(k: Kernel, name: str, least: int, limit: int, device: Device) -> Iterator[tuple[int, Kernel]]:
    """Where the load of `name` may come, from statement `least` on, and the kernel with it there: in the buffer that it has, and
    in one of its own if there is room."""
    at = next(n for n, o in enumerate(k.ops) if o.out == name)
    here = _hoisted(k, name, least, limit, device)
    yield here or (at, k)
    if here is None or here[0] > least:
        apart = _with_own_buffer(k, name)
        found = _hoisted(apart, name, least, limit, device) if apart else None
        if found:
            yield found


def _hoisted(k: Kernel, name: str, least: int, limit: int, device: Device) -> tuple[int, Kernel] | None:
    """The first place of the load for which there is room, and the kernel with it there. None if there is no room anywhere."""
    under, home = stored_under(k.body), {o.out: o.buffer for o in k.ops if o.buffer}
    at = next(n for n, o in enumerate(k.ops) if o.out == name)
    o, rest = k.ops[at], (*k.body[:at], *k.body[at + 1:])
    after = [n + 1 for n, x in enumerate(k.ops[:at]) if x.out in o.args or o.buffer in (
        x.buffer, *(home.get(y, "") for a in x.args for y in under(a)))]
    moved = ((n, replace(k, body=(*rest[:n], o, *rest[n:]))) for n in range(max([least, *after]), at + 1))
    return next((x for x in moved if packed_bytes(with_pads(x[1], device)) <= limit), None)


def _with_own_buffer(k: Kernel, name: str) -> Kernel | None:
    """The kernel with a buffer for the load of `name` alone. None if it has one, or if another value updates it in place."""
    load = next(o for o in k.ops if o.out == name)
    others, under = [o for o in k.ops if o.buffer == load.buffer and o is not load], stored_under(k.body)
    if not others or any(name in under(a) for o in others for a in o.args):
        return None
    same = next(b for b in k.buffers if b.name == load.buffer)
    def apart(o: Op) -> list[Op]:
        return [o.changed(buffer=name) if o.out == name else o]

    assert load.type is not None
    return replace(k, body=map_ops(k.body, apart), buffers=(*k.buffers, replace(same, name=name, dims=load.type.dims)))
