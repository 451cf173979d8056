"""early_loads: hoists loads within a kernel over chunks, so that they arrive while other ops run. `place` calls it after
`few_live` or `late`, which bring loads late."""
from __future__ import annotations

from dataclasses import replace

from ...ir.core import Kernel
from ..storage.live_bytes import packed_bytes
from ..uses import stored_under


def early_loads(k: Kernel, limit: int) -> Kernel:
    """`k`, a kernel over chunks with buffers, whose loads come as early as `limit` bytes of tiles in shared memory allow. Loads
    keep their order. A load stays after all that reads or fills its buffer."""
    under, home = stored_under(k.body), {o.out: o.buffer for o in k.ops if o.buffer}
    least = 0
    for o in [o for o in k.ops if o.kind == "load" and o.buffer]:
        at = k.body.index(o)
        rest = (*k.body[:at], *k.body[at + 1:])
        after = [n + 1 for n, x in enumerate(k.ops[:at]) if x.out in o.args or o.buffer in (
            x.buffer, *(home.get(y, "") for a in x.args for y in under(a)))]
        for n in range(max([least, *after]), at + 1):
            moved = replace(k, body=(*rest[:n], o, *rest[n:]))
            if n == at or packed_bytes(moved) <= limit:
                k, least = moved, n
                break
    return k
