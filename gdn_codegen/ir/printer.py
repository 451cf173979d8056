"""Prints a program as text in the form of builder calls. ir/parser.py parses the text to an equal program."""
from __future__ import annotations

import math

from .core import Buffer, Kernel, Loop, Op, Program, Stmt
from .types import Tensor


def _call(name: str, args: list[str], **kw: object) -> str:
    return f"{name}({', '.join([*args, *(f'{k}={_lit(v)}' for k, v in kw.items())])})"


def _lit(v: object) -> str:
    if isinstance(v, float) and v in (float("inf"), float("-inf")):
        return "inf" if v > 0 else "-inf"
    return repr(v)


def _tensor(t: Tensor) -> str:
    kw: dict[str, object] = {"role": t.role, "index": t.index, "heads": t.heads, "dims": t.dims, "dtype": t.dtype}
    if t.optional:
        kw["optional"] = True
    kw |= {k: v for k, v, d in (("fill", t.fill, ""), ("slots", t.slots, 1), ("strided", t.strided, False), ("at", t.at, ""),
                                ("over", t.over, ""), ("wide", t.wide, False), ("cleared", t.cleared, False),
                                ("least_step", t.least_step, -math.inf), ("setting", t.setting, False)) if v != d}
    return _call("tensor", [repr(t.name)], **kw)


def _buffer(b: Buffer) -> str:
    kw: dict[str, object] = {"space": b.space, "shape": b.shape, "dtype": b.dtype}
    kw |= {k: v for k, v, d in (("offset", b.offset, 0), ("slots", b.slots, 1), ("agent", b.agent, ""), ("dims", b.dims, ()),
                                ("layout", b.layout, ""), ("pad", b.pad, 0), ("own", b.own, False)) if v != d}
    return _call("buffer", [repr(b.name)], **kw)


def op_text(o: Op) -> str:
    """One op as a line of text."""
    kw: dict[str, object] = {**dict(o.attrs)}
    kw |= {k: v for k, v in (("line", o.line.number), ("statement", o.line.statement), ("agent", o.agent),
                             ("buffer", o.buffer)) if v}
    text = _call(o.kind, list(o.args), **kw)
    return f"{o.out} = {text}" if o.out else text


def _stmts(body: tuple[Stmt, ...], indent: str, out: list[str]) -> None:
    """Append the lines of a body to `out`. indent: the indentation of each line."""
    for s in body:
        if isinstance(s, Loop):
            carried = {c.name: (c.init, c.next, c.result, c.type.dims, c.type.dtype, *([c.slots] if c.slots > 1 else []))
                       for c in s.carried}
            warm_up = [s.warm_up] if s.warm_up else []
            step = [str(s.step)] if s.step != 1 else []
            out.append(f"{indent}with {_call('loop', [repr(s.index), *warm_up, *step], **carried)}:")
            _stmts(s.body, indent + "    ", out)
        else:
            out.append(indent + op_text(s))
    if not body:
        out.append(indent + "pass")


def kernel_text(k: Kernel) -> str:
    """One kernel as text. Fields with their default value are left out."""
    kw: dict[str, object] = {"grid": k.grid, "dims": dict(k.dims)}
    if k.blocked_dim:
        kw["blocked_dim"] = k.blocked_dim
    if k.batch.heads > 1:
        kw["batch"] = k.batch.heads, k.batch.way
    if k.slices != 1:
        kw["slices"] = k.slices
    kw |= {n: v for n in ("threads", "registers", "blocks_per_sm", "lanes", "piece", "one_loop", "by_length", "places", "by_part",
                          "start") if (v := getattr(k, n))}
    if k.comments:
        kw["comments"] = {tuple(line): text for line, text in k.comments}
    if k.agents:
        kw["agents"] = {a.name: (a.first, a.threads, a.registers, a.slots, *([a.turns] if a.turns > 1 else [])) for a in k.agents}
    out = [f"with {_call('kernel', [repr(k.name)], **kw)}:"]
    out += ["    " + _buffer(b) for b in k.buffers]
    _stmts(k.body, "    ", out)
    return "\n".join(out)


def program_text(p: Program) -> str:
    """The whole program as text."""
    more = {k: v for k, v, d in (("launch", p.launch, "kernels"), ("forgets", p.forgets, ""),
                                  ("scales", p.scales, ()), ("extents", dict(p.extents), {}), ("tokens", p.tokens, 0)) if v != d}
    head = _call("program", [repr(p.name)], stage=p.stage, scalars=p.scalars, dims=dict(p.dims), **more)
    lines = [head, *(_call("source", [str(n), repr(text)]) for n, text in p.source)]
    return "\n".join([*lines, *map(_tensor, p.tensors), *map(kernel_text, p.kernels)]) + "\n"
