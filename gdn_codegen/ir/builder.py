"""Builds programs: operators for an algorithm's page, and `Body` for passes.

A page is a Python function of `Value`s. It runs once, and its operators record ops; the Python source is not parsed. The names of
values are the function's local names at its return.
"""
from __future__ import annotations

import inspect
import linecache
import math
import sys
import traceback
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from types import FrameType
from typing import Any

from .core import NO_LINE, Carry, Kernel, Line, Loop, Op, Program, Stmt
from .decays import log_decays
from .names import name_of
from .ops import OPS, TypeRuleError, infer
from .types import Dim, Tensor, Tile


class Body:
    """Collects ops. A pure op that is appended a second time gives the value of the first (common subexpressions)."""

    def __init__(self, tensors: dict[str, Tensor] | None = None, types: dict[str, Tile] | None = None) -> None:
        self.stmts: list[Stmt] = []
        self.types: dict[str, Tile] = dict(types or {})
        self.tensors = dict(tensors or {})
        self._seen: dict[Any, str] = {}
        self.taken: set[str] = set(self.types)

    def fresh(self, hint: str) -> str:
        """An unused name: `hint`, or else `hint_2`, `hint_3`..."""
        return _free(hint, self.taken)

    def op(self, kind: str, *args: str, name: str = "", line: Line = NO_LINE, agent: str = "", buffer: str = "",
           **attrs: Any) -> str:
        """Append an op, unless an equal pure op exists, and return the name of its value. TypeRuleError for wrong operands."""
        kept = _attrs(attrs)
        if not name and (equal := self._seen.get((kind, args, kept, agent))):
            return equal
        out_type = self._type(kind, args, kept)
        effect = kind in OPS and OPS[kind].effect in ("write", "sync")
        out = "" if effect else (name or self.fresh(name_of(kind, args, attrs)))
        return self._append(Op(kind, out, args, kept, None if effect else out_type, line, agent, buffer), out_type)

    def _type(self, kind: str, args: tuple[str, ...], attrs: tuple[tuple[str, Any], ...]) -> Tile:
        """The type of the value of an op. TypeRuleError for wrong operands."""
        if kind == "load":
            of = dict(attrs)
            return self.tensors[of["tensor"]].moved(of.get("heads", 0), bool(of.get("transposed")), bool(of.get("last")),
                                                    bool(of.get("one_token")), of.get("tokens", 0), of.get("piece"))
        missing = [a for a in args if a not in self.types]
        if missing:
            raise TypeRuleError(f"{kind}: operand {missing[0]!r} is not defined before it is read")
        return infer(kind, tuple([self.types[a] for a in args]), attrs)

    def _append(self, o: Op, type: Tile) -> str:
        """Append an op, and return the name of its value. type: of its value."""
        self.taken.add(o.out)
        self.stmts.append(o)
        if o.out:
            self.types[o.out] = type
            if o.kind in OPS and OPS[o.kind].effect == "pure":
                self._seen[o.kind, o.args, o.attrs, o.agent] = o.out
        return o.out

    def equal(self, kind: str, *args: str, agent: str = "", **attrs: Any) -> str:
        """The value of an equal pure op of this body, "" if there is none."""
        return self._seen.get((kind, args, _attrs(attrs), agent), "")

    def copy(self, o: Op, names: dict[str, str] | None = None) -> str:
        """Append `o` with its operands renamed. The name of its value stays."""
        o = o.renamed(names or {})
        type = self._type(o.kind, o.args, o.attrs)
        return self._append(o if type == o.type or not o.out else o.changed(type=type), type)

    def finish(self) -> tuple[Stmt, ...]:
        """The statements so far."""
        return tuple(self.stmts)


def _attrs(attrs: dict[str, Any]) -> tuple[tuple[str, Any], ...]:
    """Attributes as an op holds them: sorted, without those that are None or False."""
    return tuple(sorted((k, v) for k, v in attrs.items() if v is not None and v is not False))


def _free(name: str, taken: set[str]) -> str:
    stem, n = name, 1
    while name in taken:
        n += 1
        name = f"{stem}_{n}"
    taken.add(name)
    return name


class _Trace:
    def __init__(self, filename: str) -> None:
        self.body = Body()
        self.filename = filename

    def line(self) -> Line:
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame.f_code.co_filename != self.filename:
            frame = frame.f_back
        return Line(frame.f_lineno if frame is not None else 0)


class Value:
    """A tile in an algorithm's page. It supports + - * / @, -x, abs(x), x.T as an operand of @, x[:, None] and x[None, :]."""

    def __init__(self, trace: _Trace, name: str, transposed: bool = False) -> None:
        self._trace, self._name, self._transposed = trace, name, transposed

    @property
    def type(self) -> Tile:
        """The dims and dtype of the tile."""
        return self._trace.body.types[self._name]

    @property
    def T(self) -> Value:
        """The transpose. It may only be an operand of @."""
        return Value(self._trace, self._name, not self._transposed)

    def __getitem__(self, key: Any) -> Value:
        known = not any(isinstance(x, Value) for x in (key if isinstance(key, tuple) else (key,)))
        if known and key == (slice(None), None):
            return apply("col", self)
        if known and key == (None, slice(None)):
            return apply("row", self)
        raise TypeRuleError(f"got {self._name}[{key!r}]; accepted: x[:, None] (a column), x[None, :] (a row), and "
                            "last(x) for the entry or row of the last token")

    def __repr__(self) -> str:
        return self._name

    def __matmul__(self, other: Value) -> Value:
        t = self._trace
        if not isinstance(other, Value):
            raise TypeRuleError(f"@ takes two tiles; got {other!r}")
        return Value(t, t.body.op("matmul", self._name, other._name, line=t.line(), ta=self._transposed,
                                  tb=other._transposed))

    def __add__(self, o: Any) -> Value: return apply("add", self, o)
    def __radd__(self, o: Any) -> Value: return apply("add", o, self)
    def __sub__(self, o: Any) -> Value: return apply("sub", self, o)
    def __rsub__(self, o: Any) -> Value: return apply("sub", o, self)
    def __mul__(self, o: Any) -> Value: return apply("mul", self, o)
    def __rmul__(self, o: Any) -> Value: return apply("mul", o, self)
    def __truediv__(self, o: Any) -> Value: return apply("div", self, o)
    def __rtruediv__(self, o: Any) -> Value: return apply("div", o, self)
    def __neg__(self) -> Value: return apply("neg", self)
    def __abs__(self) -> Value: return apply("maximum", self, -self)

    __hash__ = object.__hash__
    def __eq__(self, o: object) -> Any: raise self._unknown(f"== {_shown(o)}")
    def __ne__(self, o: object) -> Any: raise self._unknown(f"!= {_shown(o)}")
    def __lt__(self, o: object) -> Any: raise self._unknown(f"< {_shown(o)}")
    def __le__(self, o: object) -> Any: raise self._unknown(f"<= {_shown(o)}")
    def __gt__(self, o: object) -> Any: raise self._unknown(f"> {_shown(o)}")
    def __ge__(self, o: object) -> Any: raise self._unknown(f">= {_shown(o)}")
    def __bool__(self) -> bool: raise self._unknown("as a truth value")

    def _unknown(self, what: str) -> TypeRuleError:
        return TypeRuleError(f"got {self._name} {what}: a page runs once, to record ops, when no value is known, so it cannot "
                             "compare or branch on data or on a caller's number; accepted: arithmetic, maximum(x, y), masks, "
                             "or a page for each case")


def _shown(x: object) -> str:
    return x._name if isinstance(x, Value) else repr(x)


def apply(kind: str, *args: Any, **attrs: Any) -> Value:
    """Record an op on values and numbers, and return its value. TypeRuleError for operands of another kind."""
    trace = next((a._trace for a in args if isinstance(a, Value)), None)
    if trace is None:
        raise TypeRuleError(f"{kind}: none of its operands is a tile")
    line, names = trace.line(), []
    for a in args:
        if isinstance(a, (int, float)):
            names.append(trace.body.op("const", line=line, value=float(a)))
            continue
        if not isinstance(a, Value):
            raise TypeRuleError(f"{kind}: operand {a!r} is neither a tile nor a number")
        if a._transposed:
            raise TypeRuleError(f"{kind}: x.T may only be an operand of @")
        names.append(a._name)
    return Value(trace, trace.body.op(kind, *names, line=line, **attrs))


def exp(x: Value) -> Value:
    """Elementwise exp(x), for a tile of any shape."""
    return apply("exp", x)


def log(x: Value) -> Value:
    """Elementwise natural logarithm, for a tile of any shape."""
    return apply("log", x)


def sqrt(x: Value) -> Value:
    """Elementwise square root of numbers of at least 0, for a tile of any shape."""
    return x * apply("rsqrt", maximum(x, 2.0 ** -126))  # the least normal float32


def sigmoid(x: Value) -> Value:
    """Elementwise 1 / (1 + exp(-x))."""
    return apply("sigmoid", x)


def maximum(x: Any, y: Any) -> Value:
    """Elementwise maximum of two tiles of the same shape, or of a tile and a number."""
    return apply("maximum", x, y)


def row_sum(x: Value) -> Value:
    """Sum of each row: [C, K] -> [C]."""
    return apply("row_sum", x)


def cumsum(x: Value, exclusive: bool = False) -> Value:
    """Running sum over the tokens of the chunk: [C] -> [C], [C, K] -> [C, K]. x must be zero on padding.

    exclusive: without the token itself, as cumsum(x) - x.
    """
    _check_rows("cumsum", x)
    return apply("cumsum", x, exclusive=exclusive)


def per_token(x: Value) -> Value:
    """A number as a vector with one entry for each token, zero past the sequence's end: a number -> [C]."""
    return apply("valid", apply("expand", x, dims=("C",)))


def last(x: Value) -> Value:
    """The entry of the chunk's last token: [C] -> a number, [C, K] -> [K]."""
    _check_rows("last", x)
    return apply("last", x)


def _check_rows(what: str, x: Value) -> None:
    """TypeRuleError for a tile whose rows are not tokens."""
    if isinstance(x, Value) and x.type.dims[:1] != ("C",):
        hint = "" if x.type.rank else ", a number: per_token(x) gives each token an entry"
        raise TypeRuleError(f"{what} takes a value with an entry or row for each token, [C] or [C, K]; got {x.type}{hint}")


def decayed_product(a: Value, b: Value, G: Value, before: Value | None = None) -> Value:
    """Products of tokens, decayed in between: [C, K], [C, K] and log decays [C] or [C, K] -> [C, C].

    Entry i, j is the sum over k of a[i, k] b[j, k] exp(G[i, k] - G[j, k]) for j <= i, else 0. G: running sums of log decays,
    `cumsum(g)`. No exponent of a positive number is computed where gates are at most 0, however far G falls in a chunk.
    before: [C, K], the sums without the token itself, `cumsum(g, exclusive=True)`. Then a reads what is left before the token
    decays: the entry has exp(before[i, k] - G[j, k]), for j < i.
    """
    for x in (a, b, G, *([] if before is None else [before])):
        if not isinstance(x, Value):
            raise TypeRuleError(f"decayed_product(a, b, G) takes tiles; got {x!r}")
    _check_sums(G, before)
    if G.type.rank == 1 and before is None:
        return (a @ b.T) * exp(lower(G[:, None] - G[None, :], fill=-math.inf))
    return apply("decayed_product", a, b, G, *([] if before is None else [before]))


def _check_sums(G: Value, before: Value | None) -> None:
    """TypeRuleError where arguments of decayed_product are not the sums that they have to be."""
    ops = _behind([G])
    if not any(o.kind == "cumsum" for o in ops.values()):
        raise TypeRuleError(f"decayed_product(a, b, G): G has the running sums of log decays, cumsum(g); got {G._name}, which is "
                            "no sum over tokens")
    if ops[G._name].attr("exclusive"):
        raise TypeRuleError("decayed_product(a, b, G, before): G has the sums with the token itself, cumsum(g); got sums without "
                            "it, which are the fourth argument")
    if before is not None and before._name == G._name:
        raise TypeRuleError("decayed_product(a, b, G, before): before has the sums without the token itself, cumsum(g, "
                            "exclusive=True); got G itself; accepted without before: strictly_lower(decayed_product(a, b, G))")


def _behind(values: Iterable[Value]) -> dict[str, Op]:
    """The ops on which values of one page depend, with their own, by the names of their values."""
    ops, todo, found = dict[str, Op](), [], dict[str, Op]()
    for v in values:
        ops = ops or {o.out: o for o in v._trace.body.stmts if isinstance(o, Op)}
        todo.append(v._name)
    while todo:
        o = ops.get(todo.pop())
        if o is not None and o.out not in found:
            found[o.out] = o
            todo += o.args
    return found


def lower(x: Value, fill: float = 0.0) -> Value:
    """x where i >= j, else fill: [C, C] -> [C, C]."""
    return apply("lower", x, fill=fill or None)


def strictly_lower(x: Value, fill: float = 0.0) -> Value:
    """x where i > j, else fill: [C, C] -> [C, C]."""
    return apply("strictly_lower", x, fill=fill or None)


def unit_lower_inverse(x: Value) -> Value:
    """(I + x)^-1 for a strictly lower x: [C, C] -> [C, C]."""
    return apply("unit_lower_inverse", x)


def row_norm(x: Value, eps: float = 1e-6) -> Value:
    """Rows divided by sqrt(sum(x^2) + eps): [C, K] -> [C, K]."""
    return apply("row_norm", x, eps=eps)


def valid(x: Value) -> Value:
    """x with zeros past the sequence's end: [C] or [C, ...]."""
    return apply("valid", x)


class PerHead:
    """Marks a parameter of `algorithm` as a number or vector for each value head that callers may leave out."""

    def __init__(self, default: float, dims: str) -> None:
        self.default, self.dims = default, dims


def per_head(default: float, dims: str = "HV") -> PerHead:
    """A number for each value head, or a vector with the dims "HV K" or "HV V". A caller that gives no tensor gets `default` for
    all entries."""
    return PerHead(default, dims)


class Carried:
    """Marks a parameter of `algorithm` as a state, which each chunk passes to the next."""

    def __init__(self, dims: str, forgets: str) -> None:
        self.dims, self.forgets = dims, forgets


def carried(dims: str, forgets: str = "") -> Carried:
    """A state with these dims, such as "K V".

    forgets: the name of a value of the page with one entry for each token. The entry is an upper bound of the log of the factor
    by which the token can scale a difference between two states, for any input. It is less than 0 if the token makes
    differences smaller. Or a value [C, K] with an entry for each token and row of the state, of which the largest is such a
    bound of the token. Where each row of the next state depends on the same row of the state only, an entry bounds the factor
    of its row. `partition="decay"` relies on it.
    """
    return Carried(dims, forgets)


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
        for n in (self.name, *sig):
            if not (n.isascii() and n.isidentifier()):
                raise TypeRuleError(f"@algorithm of {where}: got the name {n!r}; accepted: ASCII letters, digits and _")
        self.inputs = {n: _of_input(where, n, d.dims if isinstance(d := dims[n], PerHead) else d) for n in positional
                       if not isinstance(dims[n], Carried)}
        self.defaults = {n: _default(where, n, d) for n, d in dims.items() if isinstance(d, PerHead)}
        self.states = {n: _of_state(where, n, d.dims) for n in positional if isinstance(d := dims[n], Carried)}
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
        tr = _Trace(self.fn.__code__.co_filename)
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

    def _parameters(self, tr: _Trace) -> dict[str, Value]:
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
        read = _behind(r for r in results if isinstance(r, Value))
        for n in (*self.inputs, *self.scalars):
            if n not in read:
                raise TypeRuleError(f"@algorithm of {self._where}: got {n}, on which no output and no next state depends; "
                                    f"accepted: parameters that the page reads: read {n}, or leave it out")

    def _called(self, tr: _Trace, values: dict[str, Value]) -> tuple[tuple[Value, ...], dict[str, Any], int]:
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

    def _distinct(self, tr: _Trace, results: tuple[Value, ...]) -> tuple[list[Value], list[Value], dict[str, str]]:
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

    def _renaming(self, tr: _Trace, local: dict[str, Any], following: list[Value], same: dict[str, str]) -> dict[str, str]:
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
            rename[o.out] = _free(want, taken)
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


def _scalar(tr: _Trace, name: str) -> str:
    out = Op("scalar", name, (), (("param", name),), Tile(()))
    tr.body.stmts.append(out)
    tr.body.types[name] = Tile(())
    tr.body.taken.add(name)
    return name


def _state_tensors(name: str, n: int) -> tuple[str, str]:
    return ("initial_state", "final_state") if n == 1 else (f"initial_{name}", f"final_{name}")


def _dims(algorithm: str, name: str, text: Any) -> tuple[str, tuple[Dim, ...]]:
    """Parse the dims of a parameter, such as "C K": (heads, dims). algorithm: the page with its place, for messages.

    A leading "H" or "HV" gives the heads. Without it, a tensor with C and K but no V has H, and others have HV. "HV" alone is a
    number for each value head.
    """
    if not isinstance(text, str):
        raise TypeRuleError(f"@algorithm of {algorithm}: {name}={text!r}; accepted: dims as text, such as \"C K\"")
    words = text.split()
    heads = words.pop(0) if words and words[0] in ("H", "HV") else ""
    if (not words and heads != "HV") or any(w not in ("C", "K", "V") for w in words):
        raise TypeRuleError(f"@algorithm of {algorithm}: {name}={text!r}; dims are C, K and V, after H or HV if given, or HV "
                            "alone for a number for each value head")
    return heads or ("H" if "K" in words and "V" not in words and "C" in words else "HV"), tuple(words)


def _of_input(algorithm: str, name: str, text: Any) -> tuple[str, tuple[Dim, ...]]:
    """The heads and dims of an input. TypeRuleError unless C comes first, or it is a number or vector for each value head."""
    heads, dims = _dims(algorithm, name, text)
    if dims[:1] != ("C",) and not (heads == "HV" and len(dims) < 2):
        raise TypeRuleError(f"@algorithm of {algorithm}: {name}={text!r}; an input has C first, or it is HV, HV K or HV V; a "
                            f"state is carried({text!r})")
    if len(dims) > 2 or "C" in dims[1:]:
        raise TypeRuleError(f"@algorithm of {algorithm}: {name}={text!r}; after C an input has nothing, K or V")
    return heads, dims


def _of_state(algorithm: str, name: str, text: Any) -> tuple[Dim, ...]:
    """The dims of a state. TypeRuleError unless they are one or two of K and V."""
    dims = _dims(algorithm, name, text)[1]
    if not 1 <= len(dims) <= 2 or "C" in dims:
        raise TypeRuleError(f"@algorithm of {algorithm}: {name}=carried({text!r}); a state has one or two dims, each K or V, and "
                            "lives from chunk to chunk, so it has no C")
    return dims


def _default(algorithm: str, name: str, given: PerHead) -> float:
    """The default of a number or vector for each head. TypeRuleError if it is no finite number, or for other dims."""
    if "C" in given.dims.split():
        raise TypeRuleError(f"@algorithm of {algorithm}: {name}={given.dims!r}; accepted with a default: HV, HV K and HV V")
    x = given.default
    if isinstance(x, bool) or not isinstance(x, (int, float)) or not math.isfinite(x):
        raise TypeRuleError(f"@algorithm of {algorithm}: {name}=per_head({x!r}); accepted: a finite number")
    return float(x)


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


def algorithm(**dims: str | Carried | PerHead) -> Callable[[Callable[..., Any]], Algorithm]:
    """Declare a page. The arguments give the dims of its parameters, such as q="C K", "HV" for a number for each value
    head, "HV K" for a vector, per_head(0.0) for a number that callers may leave out, or carried("K V") for a state.

    The decorated function computes one chunk. It returns its outputs, and then the next value of each state. Its keyword-only
    parameters are numbers that the caller passes, such as scale.
    """
    return lambda fn: Algorithm(fn, dims)
