"""buffer_names: names buffers after the values that they hold. `place`, `rings` and `pack` use it.

A buffer of one value has the name of that value. A buffer that is updated in place, by accumulation or inversion, has the name
of the final value, or that of the carried value if it holds one. A buffer that holds unrelated values one after another has the
names of both, as in `v_then_beta_v`. If there are more than two, or the name is long, its name says what the buffer is:
`vector_C`, or `tile_C_V_1`, `tile_C_V_2` if the kernel has several. `q_tokens` holds q of the tokens of a group.
"""
from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from itertools import count

from ...ir.core import Buffer, Kernel, loops, map_ops
from ...ir.names import stem
from ..uses import stored_under

#: The most characters of a name that joins the names of two values.
LONGEST = 24
#: Suffixes of values that were moved. They do not describe what is computed.
_MOVED = re.compile(r"_(?:shared|out)$")


def named(k: Kernel) -> Kernel:
    """The kernel with such a name for each buffer that ops fill. Their order stays."""
    names = {b: x for b, x in _names(k).items() if x != b}
    return replace(k, body=map_ops(k.body, lambda o: [o.changed(buffer=names[o.buffer]) if o.buffer in names else o]),
                   buffers=tuple(replace(b, name=names.get(b.name, b.name)) for b in k.buffers))


def _names(k: Kernel) -> dict[str, str]:
    """The name of each buffer that ops fill, by its name so far."""
    carried, held = _carried(k), _held(k)
    names, shared = dict(carried), {}
    for b in k.buffers:
        if b.name in carried or b.name not in held:
            continue
        own = held[b.name]
        joined = "_then_".join(stem(_MOVED.sub("", x)) for x in own)
        if len(own) == 1:
            names[b.name] = own[0]
        elif own == [own[0], own[0].removesuffix("_first") + "_next"]:  # a value of the first group of tokens, and of the next
            shared[b.name] = own[0].removesuffix("_first") + "_tokens"
        elif len(own) == 2 and len(joined) <= LONGEST:
            shared[b.name] = joined
        else:
            shared[b.name] = _kind(b)
    return names | _numbered(shared, {o.out for o in k.ops} | set(names.values()))


def _numbered(names: dict[str, str], taken: set[str]) -> dict[str, str]:
    """The names with numbers where several are equal, or where a value has the name."""
    several = {x for x, n in Counter(names.values()).items() if n > 1 or x in taken}
    out: dict[str, str] = {}
    for b, x in names.items():
        free = (f"{x}_{n}" for n in count(1))
        out[b] = next(y for y in free if y not in taken) if x in several else x
        taken = taken | {out[b]}
    return out


def _carried(k: Kernel) -> dict[str, str]:
    """For each buffer of a carried value: the name of the value. That of an outer loop comes first."""
    home, own = {o.out: o.buffer for o in k.ops if o.buffer}, {b.name for b in k.buffers}
    out: dict[str, str] = {}
    for lp in loops(k.body):
        for c in lp.carried:
            home[c.name] = home[c.result] = c.name if c.name in own else home.get(c.init, c.name)
            out.setdefault(home[c.name], c.name)
    return out


def _held(k: Kernel) -> dict[str, list[str]]:
    """The values that each buffer holds one after another. Of values that update each other in place there is the final one."""
    under = stored_under(k.body)
    out: dict[str, list[str]] = {}
    for o in k.ops:
        if not o.buffer:
            continue
        own = out.setdefault(o.buffer, [])
        if own and own[-1] in {x for a in o.args for x in under(a)}:
            own.pop()
        own.append(o.out)
    return out


def _kind(b: Buffer) -> str:
    """What a buffer is: its rank, and its dims or sizes."""
    rank = ("number", "vector", "tile")[len(b.shape)]
    return "_".join((rank, *map(str, b.dims or b.shape)))
