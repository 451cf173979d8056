"""Pages: `Algorithm` has a page's function, runs it once, and makes a program of what it recorded.

The Python source is not parsed. The names of values are the function's local names at its return.
"""
from __future__ import annotations

import inspect
import linecache
import math
import sys
import traceback
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from types import FrameType
from typing import Any

from .body import free
from .core import NO_LINE, Carry, Kernel, Line, Loop, Op, Program, Stmt
from .decays import log_decays
from .names import name_of
from .ops import TypeRuleError
from .parameters import Carried, PerHead, default_of, of_input, of_state
from .types import Tensor, Tile
from .values import Trace, Value, behind

#: Names that generated functions use, for other parameters or in their bodies.
RESERVED = ("HOST", "checkpoint_chunks", "cu_seqlens", "out", "output_final_state", "state_indices", "torch")


class Algorithm:
    """A page: its function, the dims of its inputs and states, and the numbers that it takes."""

    def __init__(self, fn: Callable[..., Any], dims: dict[str, str | Carried | PerHead]) -> None:
        """Reads the signature of `fn`. dims: the dims of each positional parameter. TypeRuleError for a name that is not
        ASCII, for wrong dims or defaults, and for parameters and dims that differ."""
        self.fn, self.name, self.doc = fn, fn.__name__, inspect.getdoc(fn) or ""
        where = self._where = f"{self.name} ({Path(fn.__code__.co_filename).name}, line {fn.__code__.co_firstlineno})"
        sig = inspect.signature(fn).parameters
        self.scalars = {p.name: p.default for p in sig.values() if p.kind is p.KEYWORD_ONLY}
        positional = tuple(p.name for p in sig.values() if p.kind is not p.KEYWORD_ONLY)
        if set(positional) != set(dims):
            raise TypeRuleError(f"@algorithm of {where}: it names {', '.join(dims)}, the function takes "
                                f"{', '.join(positional)}; numbers of the caller are keyword-only, after *")
        given = [p.name for p in sig.values() if p.kind is not p.KEYWORD_ONLY and p.default is not p.empty]
        if given:
            raise TypeRuleError(f"@algorithm of {where}: got a default of {given[0]}; accepted: defaults of numbers, after *; "
                                "callers may leave out what per_head(0.0) declares, and states")
        for n in (self.name, *sig):
            if not (n.isascii() and n.isidentifier()):
                raise TypeRuleError(f"@algorithm of {where}: got the name {n!r}; accepted: ASCII letters, digits and _")
        self.inputs = {n: of_input(where, n, d.dims if isinstance(d := dims[n], PerHead) else d) for n in positional
                       if not isinstance(dims[n], Carried)}
        self.defaults = {n: default_of(where, n, d) for n, d in dims.items() if isinstance(d, PerHead)}
        self.states = {n: of_state(where, n, d.dims) for n in positional if isinstance(d := dims[n], Carried)}
        self.forgets = next((d.forgets for d in dims.values() if isinstance(d, Carried) and d.forgets), "")

    def scalar_defaults(self, sizes: dict[str, int]) -> dict[str, float | None]:
        """The default of each number that the caller passes, None if it has no default.

        A default in the page is a number, or text with an expression over the dims, such as scale="K ** -0.5". TypeRuleError if
        it is not finite or cannot be evaluated.
        """
        out: dict[str, float | None] = {}
        for n, d in self.scalars.items():
            if d is inspect.Parameter.empty:
                out[n] = None
                continue
            try:
                out[n] = x = float(eval(d, {"__builtins__": {}}, dict(sizes)) if isinstance(d, str) else d)
                why = "" if math.isfinite(x) else "not finite"
            except Exception as e:
                why = f"{type(e).__name__}: {_line_of(e)}"
            if why:
                raise TypeRuleError(f"{n}: got the default {d!r} in {self._where} ({why}); accepted: a finite number, or an "
                                    "expression over C, K and V as text")
        return out

    def _check_names(self) -> None:
        """Raise TypeRuleError for a parameter whose name generated functions use otherwise."""
        own = [n for s in self.states for n in _state_tensors(s, len(self.states))]
        words = sorted({*RESERVED, *own})
        for n in (*self.inputs, *self.states, *self.scalars):
            if n in words or n.startswith(("out_", "_")):
                raise TypeRuleError(f"{n}: got a parameter of this name in {self._where}; accepted: names that do not begin "
                                    f"with _ or out_, other than {', '.join(words)}")

    def trace(self) -> Program:
        """The page's program, with one kernel, which loops over the chunks, with all values in float32. The page runs once.

        TypeRuleError for an error in the page, with its line.
        """
        return self._traced

    @cached_property
    def _traced(self) -> Program:
        """What `trace` gives. The page runs now."""
        self._check_names()
        tr = Trace(self.fn.__code__.co_filename)
        values = self._parameters(tr)
        results, local, line = self._called(tr, values)
        outputs, following, same = self._distinct(tr, results)
        self._check_results(outputs, following, line)
        self._check_read((*results, local.get(self.forgets)))
        rename = self._renaming(tr, local, following, same)
        forgets = self.forgets and self._bound(local, rename)
        body: list[Stmt] = []
        for o in tr.body.stmts:
            assert isinstance(o, Op)
            body.append(Op(o.kind, rename[o.out], tuple(rename[a] for a in o.args), o.attrs, o.type, o.line))
        tensors = dict(tr.body.tensors)
        for r in outputs:
            out = rename[r._name]
            tensors[out] = Tensor(out, "output", "token", "HV", r.type.dims)
            body.append(Op("store", "", (out,), (("tensor", out),)))
        carries, before, after = [], [], []
        for s, r in zip(self.states, following, strict=True):
            t = Tile(self.states[s])
            initial, final = _state_tensors(s, len(self.states))
            tensors[initial] = Tensor(initial, "input", "sequence", "HV", t.dims, optional=True)
            tensors[final] = Tensor(final, "output", "sequence", "HV", t.dims, optional=True)
            carries.append(Carry(s, f"{s}_0", rename[r._name], f"{s}_T", t))
            before.append(Op("load", f"{s}_0", (), (("tensor", initial),), t))
            after.append(Op("store", "", (f"{s}_T",), (("tensor", final),)))
        loop = Loop("chunk", tuple(carries), tuple(body))
        kernel = Kernel("walk", "sequences", (*before, loop, *after))
        lines = sorted({o.line.number for o in body if isinstance(o, Op) and o.line != NO_LINE})
        source = tuple((n, linecache.getline(tr.filename, n).strip().split("  #")[0].rstrip("\\ \t")) for n in lines)
        p = Program(self.name, "traced", tuple(tensors.values()), (kernel,), tuple(self.scalars), (), source, forgets=forgets)
        decays = log_decays(p)
        return replace(p, tensors=tuple(replace(t, wide=t.name in decays and len(t.dims) > 1) for t in p.tensors))

    def _parameters(self, tr: Trace) -> dict[str, Value]:
        """The values that the page's function gets: loads of inputs, states, and numbers of the caller."""
        values: dict[str, Value] = {}
        for n, (heads, dims) in self.inputs.items():
            fill = str(self.defaults[n]) if n in self.defaults else ""
            tr.body.tensors[n] = Tensor(n, "input", "token" if "C" in dims else "head", heads, dims, fill=fill)
            values[n] = Value(tr, tr.body.op("load" if dims else "scalar", name=n, tensor=n))
        for n, dims in self.states.items():
            tr.body.types[n] = Tile(dims)
            tr.body.taken.add(n)
            values[n] = Value(tr, n)
        for n in self.scalars:
            values[n] = Value(tr, _scalar(tr, n))
        return values

    def _at(self, line: int | None) -> str:
        """A line of the page, for messages."""
        return f"{self.name} ({Path(self.fn.__code__.co_filename).name}{f', line {line}' if line else ''})"

    def _check_results(self, outputs: list[Value], following: list[Value], line: int) -> None:
        """TypeRuleError for outputs that have no row for each token, and next states of other dims than the states. line: where
        the page returns them."""
        order = f"return the outputs, then the next of each state ({', '.join(self.states) or 'none'})"
        for i, r in enumerate(outputs, 1):
            if r.type.dims[:1] != ("C",) or "C" in r.type.dims[1:]:
                raise TypeRuleError(f"{self._at(line)}: output {i} is {r.type}; an output has an entry or row for each token, as "
                                    f"[C] or [C, V]; {order}")
        for s, r in zip(self.states, following, strict=True):
            if r.type != Tile(self.states[s]):
                raise TypeRuleError(f"{self._at(line)}: the next {s} is {r.type}, but {s} is {Tile(self.states[s])}; {order}")

    def _check_read(self, results: tuple[Any, ...]) -> None:
        """TypeRuleError for an input, or a number of the caller, on which none of the results depends. results: what the page
        returns, and its bound of what tokens forget, if any."""
        read = behind(r for r in results if isinstance(r, Value))
        for n in (*self.inputs, *self.scalars):
            if n not in read:
                raise TypeRuleError(f"@algorithm of {self._where}: got {n}, on which no output and no next state depends; "
                                    f"accepted: parameters that the page reads: read {n}, or leave it out")

    def _called(self, tr: Trace, values: dict[str, Value]) -> tuple[tuple[Value, ...], dict[str, Any], int]:
        """What the page's function returns, its local variables, and the line of its return. TypeRuleError, with the line, if it
        fails or returns something else than values."""
        try:
            result, local, line = _call_with_locals(self.fn, values)
        except Exception as e:
            at = next((f.lineno for f in reversed(traceback.extract_tb(e.__traceback__)) if f.filename == tr.filename), 0)
            what = str(e) if isinstance(e, TypeRuleError) else (f"got {type(e).__name__}: {_line_of(e)}; accepted: operators and "
                                                                "functions of gdn_codegen.ir.builder")
            raise TypeRuleError(f"{self._at(at)}: {what}") from e
        results = result if isinstance(result, tuple) else (result,)
        if len(results) <= len(self.states) or not all(isinstance(r, Value) for r in results):
            what = next((f"{r!r}, which is no tile" for r in results if not isinstance(r, Value)), f"{len(results)} values")
            raise TypeRuleError(f"{self._at(line)}: return the outputs, then the next of each state "
                                f"({', '.join(self.states) or 'none'}); got {what}")
        if any(r._transposed for r in results):
            raise TypeRuleError(f"{self._at(line)}: got x.T among what it returns; accepted: values without .T")
        return results, local, line

    def _distinct(self, tr: Trace, results: tuple[Value, ...]) -> tuple[list[Value], list[Value], dict[str, str]]:
        """The outputs and the next states, each a value of its own that the chunk computes, because passes assume that.

        A result that is also a parameter or an earlier result becomes a product with 1. The dict has the names of such products.
        """
        seen, same, out = {*self.inputs, *self.states, *self.scalars}, {}, []
        for r in results:
            name = r._name
            if name in seen:
                name = tr.body.op("mul", name, tr.body.op("const", value=1.0), name=tr.body.fresh("same"))
                same[name] = f"same_{r._name}"
            seen.add(name)
            out.append(Value(tr, name))
        n = len(out) - len(self.states)
        return out[:n], out[n:], same

    def _renaming(self, tr: Trace, local: dict[str, Any], following: list[Value], same: dict[str, str]) -> dict[str, str]:
        """The name of each traced value: that of the page's local variable, or else one made of the op and its operands."""
        names = {v._name: k for k, v in local.items() if isinstance(v, Value) and not v._transposed
                 and k not in self.states and v._name not in self.inputs}
        for k in local:
            if isinstance(local[k], Value) and k not in self.states:
                names.setdefault(local[k]._name, k)
        for s, r in zip(self.states, following, strict=True):
            names.setdefault(r._name, f"{s}_next")
        names = same | names
        rename, about = {s: s for s in self.states}, _lines(tr.body.stmts, names)
        operands = {a for o in tr.body.stmts if isinstance(o, Op) and o.kind == "matmul" for a in o.args}
        taken = set(self.inputs) | set(self.states)
        for o in tr.body.stmts:
            assert isinstance(o, Op)
            if o.out in self.inputs:
                rename[o.out] = o.out
                continue
            want = names.get(o.out) or name_of(o.kind, tuple(rename[a] for a in o.args), dict(o.attrs),
                                               about.get(o.line, "").removesuffix("_next"), o.out in operands)
            rename[o.out] = free(want, taken)
        return rename

    def _bound(self, local: dict[str, Any], rename: dict[str, str]) -> str:
        """The value that bounds what tokens forget. TypeRuleError if it is no value of the page with one entry for each token, or
        for each token and row of the state."""
        bound, rows = local.get(self.forgets), {dims[:1] for dims in self.states.values()}
        accepted = [Tile(("C",)), *(Tile(("C", *d)) for d in sorted(rows))]
        if not isinstance(bound, Value) or bound.type not in accepted:
            got = f", but {bound.type}" if isinstance(bound, Value) else ""
            raise TypeRuleError(f"@algorithm of {self._where}: forgets={self.forgets!r} is not a value of the page with dims "
                                f"{' or '.join(' '.join(map(str, t.dims)) for t in accepted)}{got}")
        return rename[bound._name]


def _lines(stmts: list[Stmt], names: dict[str, str]) -> dict[Line, str]:
    """Line of the page -> the name of the value that it defines. If it defines several, the last."""
    return {o.line: names[o.out] for o in stmts if isinstance(o, Op) and o.line != NO_LINE and o.out in names}


def _line_of(e: Exception) -> str:
    """The message of an exception, in one line."""
    return " ".join(str(e).split())


def _scalar(tr: Trace, name: str) -> str:
    out = Op("scalar", name, (), (("param", name),), Tile(()))
    tr.body.stmts.append(out)
    tr.body.types[name] = Tile(())
    tr.body.taken.add(name)
    return name


def _state_tensors(name: str, n: int) -> tuple[str, str]:
    return ("initial_state", "final_state") if n == 1 else (f"initial_{name}", f"final_{name}")


def _call_with_locals(fn: Callable[..., Any], values: dict[str, Value]) -> tuple[Any, dict[str, Any], int]:
    """The result of fn(**values), its local variables at its return, which give the page's names of values, and the line of the
    return."""
    local: dict[str, Any] = {}
    line = 0
    code, before = fn.__code__, sys.gettrace()

    def at_return(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal line
        if event == "return":
            local.update(frame.f_locals)
            line = frame.f_lineno
        return at_return

    def enter(frame: FrameType, event: str, arg: Any) -> Any:
        return at_return if frame.f_code is code else None

    sys.settrace(enter)
    try:
        result = fn(**values)
    finally:
        sys.settrace(before)
    return result, local, line
