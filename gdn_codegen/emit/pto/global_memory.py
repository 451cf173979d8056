"""Rules for loads and stores, for `transpose`, and for `valid`, which fills rows and columns that do not exist in memory."""
from __future__ import annotations

from ...ir.types import BYTES, Tensor
from ..base import EVERY, EmitError, Op, strides
from .kernel import KernelWriter, assigned, braces, rule
from .values import CTYPE


@rule("load")
def _load(k: KernelWriter, o: Op) -> list[str]:
    """A load of a tile or vector from global memory. It does not write the rows past the sequence's end; `valid` clears them.

    EmitError for several heads, unless a vector core loads them from a caller's tensor.
    """
    t, b, name = k.p.tensor(o.attr("tensor")), k.buffer(o.out), k.name(o.out)
    ctype = CTYPE[b.dtype]
    if o.attr("heads") and (k.agent != "vector" or t.index != "token"):
        raise EmitError(f"pto loads several heads of a caller's tensor with vector cores only; {o.out} is on the {k.agent} core")
    if o.attr("heads"):  # those of this core
        far = strides(t)[2] if t.strided else "T"
        at, stride = k.at(o, "0", f" + sub * {b.shape[1]}")
        sizes, valid = (b.shape[::-1], "mine, rows") if k.by_head(o.out) else (b.shape, "rows, mine")
        return [assigned(f"UbPart<{ctype}, {', '.join(map(str, sizes))}>", name, k.address(o.out), valid),
                f"if (mine > 0) TLOAD({name}, view({at}, {valid}, {far if k.by_head(o.out) else stride}));"]
    if t.index == "token":
        rows, part = f"rows{k.which}", f"part{k.which}"
        first = f"if ({rows} > 0) " if k.which else ""
        if k.agent == "cube":
            cols = k.cols(t, o.attr("piece"))
            return [assigned(f"L1Part<{ctype}, {b.shape[0]}, {b.shape[1]}>", name, k.address(o.out), f"{rows}, {cols}"),
                    f"{first}TLOAD({name}, {k.view(o, '0', rows, cols)});"]
        if len(t.dims) == 1:
            return [assigned(f"UbWidePart<{ctype}, {b.shape[0]}>", name, k.address(o.out), rows),
                    f"{first}TLOAD({name}, {k.view(o, '0', rows, 1)});"]
        cols = k.cols(t, o.attr("piece"))
        return [assigned(f"UbPart<{ctype}, {b.shape[0]}, {b.shape[1]}>", name, k.address(o.out), f"{part}, {cols}"),
                f"if ({part} > 0) TLOAD({name}, {k.view(o, f'sub * {b.shape[0]}', part, cols)});"]
    if len(t.dims) == 1 or o.attr("last"):
        n, row = k.cols(t, o.attr("piece")), str(t.tile.shape(k.sizes)[0] - 1) if o.attr("last") else "0"
        shape, some, view = f"1, {b.shape[0]}", f"1, {n}", f"view({k.at(o, row)[0]}, 1, {n}, {n})"
    else:
        row = "0" if b.shape[0] == t.tile.shape(k.sizes)[0] else f"sub * {b.shape[0]}"
        view, (rows, cols) = _mine(k, o, o.out, t, row)
        shape, some = f"{b.shape[0]}, {b.shape[1]}", f"{rows}, {cols}"
    exists = "" if len(t.dims) == 1 or o.attr("last") else k.exists(o.out, t, bool(o.attr("columns")))
    when = _if(f"has_{t.name}" if t.optional else "", exists)
    if any(k.p.padded(t)):
        return braces([assigned(f"UbPart<{ctype}, {shape}>", "some", k.address(o.out), some), f"TLOAD(some, {view});"], when)
    return [f"{when}TLOAD({name}, {view});"]


@rule("store")
def _store(k: KernelWriter, o: Op) -> list[str]:
    """A store of a tile or vector to global memory. To a caller's tensor it stores only the rows with tokens.

    A vector goes to a caller's tensor from its spread form. EmitError for several heads on the cube core.
    """
    t, value = k.p.tensor(o.attr("tensor")), o.args[0]
    b, name = k.buffer(value), k.name(value)
    ctype = CTYPE[b.dtype]
    if t.index == "token":
        if len(t.dims) == 1:
            n = k.sizes["C"] // 2
            address = k.address(value) + (f" + sub * {n * 32}" if k.whole(value) else "")
            return braces([assigned(f"UbWidePart<{ctype}, {n}>", "valid", address, "part"),
                           f"TSTORE({k.view(o, f'sub * {n}', 'part', 1)}, valid);"], "if (part > 0) ")
        if k.agent == "cube":
            cols = k.cols(t, o.attr("piece"))
            return braces([assigned(f"AccPart<{ctype}, {b.shape[0]}, {b.shape[1]}>", "valid", k.address(value), f"rows, {cols}"),
                           f"TSTORE({k.view(o, '0', 'rows', cols)}, valid);"])
        cols = k.cols(t, o.attr("piece"))
        return braces([assigned(f"UbPart<{ctype}, {b.shape[0]}, {b.shape[1]}>", "valid", k.address(value), f"part, {cols}"),
                       f"TSTORE({k.view(o, f'sub * {b.shape[0]}', 'part', cols)}, valid);"], "if (part > 0) ")
    if o.attr("heads"):  # those of this core
        if k.agent != "vector":
            raise EmitError(f"pto stores several heads with vector cores only; {value} is on the {k.agent} core")
        n, size = b.shape
        return braces([assigned(f"UbPart<{ctype}, {n}, {size}>", "valid", k.address(value), f"mine, {size}"),
                       f"TSTORE(view({k.at(o, '0')[0]} + sub * {n * size}, mine, {size}, {size}), valid);"], "if (mine > 0) ")
    if len(t.dims) == 1:  # each core stores its part
        n = b.shape[0] // 2 if k.whole(value) else b.shape[0]
        address = k.address(value) + (f" + sub * {n * BYTES[b.dtype]}" if k.whole(value) else "")
        pointer, _ = k.at(o, f"sub * {n}")
        some = f"part_of({k.cols(t)}, sub, {n})" if any(k.p.padded(t)) else str(n)
        tile = (assigned(f"UbPart<{ctype}, 1, {n}>", "mine", address, f"1, {some}") if any(k.p.padded(t)) else
                assigned(f"UbTile<{ctype}, 1, {n}>", "mine", address))
        exists = f"{some} > 0" if any(k.p.padded(t)) and t.dims[0] == k.k.blocked_dim else ""
        return braces([tile, f"TSTORE(view({pointer}, 1, {some}, {some}), mine);"], _if(*_when(k, t), exists))
    row = "0" if k.agent == "cube" else f"sub * {b.shape[0]}"
    view, (rows, cols) = _mine(k, o, value, t, row)
    when = _if(*_when(k, t), k.exists(value, t, bool(o.attr("columns"))))
    if any(k.p.padded(t)):
        kind = f"{'AccPart' if k.agent == 'cube' else 'UbPart'}<{ctype}, {b.shape[0]}, {b.shape[1]}>"
        return braces([assigned(kind, "some", k.address(value), f"{rows}, {cols}"), f"TSTORE({view}, some);"], when)
    return [f"{when}TSTORE({view}, {name});"]


def _if(*conditions: str) -> str:
    """What goes before statements under these conditions. "" says nothing."""
    said = " && ".join(x for x in conditions if x)
    return f"if ({said}) " if said else ""


def _when(k: KernelWriter, t: Tensor) -> list[str]:
    """The conditions of a store: that the caller wants `t`, and for a checkpoint that it is due."""
    when = [f"has_{t.name}"] if t.optional else []
    if t.index == "checkpoint" and t.at:
        when.append(f"{k.kept_at(t)} >= 0")
    elif t.index == "checkpoint":
        when += [f"(c + 1) % {EVERY} == 0", f"rows == {k.p.sizes['C']}"]
    return when


def _mine(k: KernelWriter, o: Op, value: str, t: Tensor, row: str) -> tuple[str, tuple[str, str]]:
    """A view in memory of this core's part of a tile (its rows beginning at `row`, or its columns), and its (rows, columns)."""
    b = k.buffer(value)
    some = (k.some(value, t, bool(o.attr("columns")), o.attr("piece")) if any(k.p.padded(t)) else
            (str(b.shape[0]), str(b.shape[1])))
    if not o.attr("columns"):
        return k.view(o, row, *some), some
    pointer, stride = k.at(o, "0")
    return f"view({pointer} + sub * {b.shape[1]}, {', '.join(some)}, {stride})", some


@rule("transpose")
def _transpose(k: KernelWriter, o: Op) -> list[str]:
    return [f"TTRANS({k.name(o.out)}, {k.name(o.args[0])}, {o.out}_scratch);"]


@rule("valid")
def _valid(k: KernelWriter, o: Op) -> list[str]:
    """Writes zeros: in rows past the sequence's end, in columns past the caller's tensor, or in the whole tile if an optional
    tensor is absent."""
    raw, name, b = k.name(o.args[0]), k.name(o.out), k.buffer(o.out)
    rows, part = f"rows{k.which}", f"part{k.which}"
    if o.attr("given"):
        if k.agent != "vector":
            raise EmitError(f"pto reads the optional {o.attr('given')} with vector cores only; this op is on the {k.agent} core")
        t = k.p.tensor(o.attr("given"))
        if any(k.p.padded(t)):
            load = k.defs[o.args[0]]
            columns = bool(load.attr("columns"))
            rows, cols = ("1", k.cols(t)) if len(t.dims) == 1 else k.some(o.out, t, columns, load.attr("piece"))
            shape = ", ".join(map(str, b.shape if len(t.dims) > 1 else (1, *b.shape)))
            lines = [assigned(f"UbPart<{CTYPE[b.dtype]}, {shape}>", "some", k.address(o.out), f"{rows}, {cols}"),
                     f"TFILLPAD_INPLACE({name}, some);"]
            exists = "" if len(t.dims) == 1 else k.exists(o.out, t, columns)
            if not t.optional and not exists:
                return braces(lines)
            when = _if(f"has_{t.name}" if t.optional else "", exists)
            return [f"{when}{{", *(f"    {x}" for x in lines), "} else {", f"    TEXPANDS({name}, 0);", "}"]
        return [f"if (!has_{o.attr('given')}) TEXPANDS({name}, 0);"]
    if k.agent == "cube":
        source = k.defs.get(o.args[0])
        given, width = _columns(k, source) if source is not None and source.kind == "load" else (0, 0)
        block = 32 // BYTES[b.dtype]  # the load fills the last block of a row
        if -(-given // block) * block < width:
            return [f"TFILLPAD({raw}, {raw});"]
        return [f"if ({rows} < {b.shape[0]}) TFILLPAD({raw}, {raw});"]
    if k.is_wide(o.out):
        return [f"fill_wide({raw}, {rows}, {k.address(o.out)});"]
    source = k.defs.get(o.args[0])
    if source is None or source.kind != "load":  # a computed value: make a view of its valid part
        flat = len(b.shape) == 1
        some = rows if flat and k.whole(o.out) else part
        shape, sizes = (f"1, {b.shape[0]}", f"1, {some}") if flat else (f"{b.shape[0]}, {b.shape[1]}", f"{some}, {b.shape[1]}")
        fill = f"fill_row({name}, valid, {some});" if flat else f"fill_rows({name}, valid, {some}, {k.address(o.out)});"
        return braces([assigned(f"UbPart<float, {shape}>", "valid", k.address(o.out), sizes), fill])
    if source.attr("heads"):
        return [f"if (rows < {b.shape[0]} || mine < {b.shape[1]}) fill_tile({name}, {raw}, mine, {k.address(o.out)});"]
    given, width = _columns(k, source)
    return [f"{'fill_tile' if given < width else 'fill_rows'}({name}, {raw}, {part}, {k.address(o.out)});"]


def _columns(k: KernelWriter, o: Op) -> tuple[int, int]:
    """How many columns of what a load moves memory has, and how many the tile has, with all blocks of a dim together."""
    t = k.p.tensor(o.attr("tensor"))
    first, width = o.attr("piece") or (0, t.tile.shape(k.p.sizes)[-1])
    return min(k.p.shape(t)[-1] - first, width), width
