"""What a page is written with: `algorithm`, which declares it, and the functions of its tiles.

A page is a Python function of `Value`s (ir/values.py), which have operators, too. It runs once, to record ops (ir/page.py).
"""
from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from .ops import TypeRuleError
from .page import Algorithm
from .parameters import Carried, PerHead
from .values import Value, apply, behind

__all__ = [
    "algorithm", "apply", "carried", "cumsum", "decayed_product", "delay", "exp", "last", "latest", "log", "lower", "maximum",
    "per_head", "per_token", "row_norm", "row_sum", "sigmoid", "sqrt", "strictly_lower", "unit_lower_inverse", "valid",
]


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


def delay(x: Value, *before: Value) -> Value:
    """The rows of tokens so many before, as there are further arguments: [C, K] and vectors [K] -> [C, K].

    before: what the first rows are, the oldest first. With a state that carries `latest(x)` this crosses chunks: x of the token
    before is `delay(x, S)`, and then x of the token before that is `delay(delay(x, S), R)`, where R carries
    `latest(delay(x, S))`.
    """
    _check_rows("delay", x)
    return apply("delay", x, *before)


def latest(x: Value) -> Value:
    """The row of the chunk's last token: [C, K] -> [K]. `last(x)` is the last row of the tile, which in the last chunk of a
    sequence may be past the sequence's end."""
    _check_rows("latest", x)
    if x.type.rank != 2:
        raise TypeRuleError(f"latest takes a tile with a row for each token; got {x.type}")
    return apply("latest", x)


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
    ops = behind([G])
    if not any(o.kind == "cumsum" for o in ops.values()):
        raise TypeRuleError(f"decayed_product(a, b, G): G has the running sums of log decays, cumsum(g); got {G._name}, which is "
                            "no sum over tokens")
    if ops[G._name].attr("exclusive"):
        raise TypeRuleError("decayed_product(a, b, G, before): G has the sums with the token itself, cumsum(g); got sums without "
                            "it, which are the fourth argument")
    if before is not None and before._name == G._name:
        raise TypeRuleError("decayed_product(a, b, G, before): before has the sums without the token itself, cumsum(g, "
                            "exclusive=True); got G itself; accepted without before: strictly_lower(decayed_product(a, b, G))")


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


def per_head(default: float, dims: str = "HV") -> PerHead:
    """A number for each value head, or a vector with the dims "HV K" or "HV V". A caller that gives no tensor gets `default` for
    all entries."""
    return PerHead(default, dims)


def carried(dims: str, forgets: str = "") -> Carried:
    """A state with these dims, such as "K V".

    forgets: the name of a value of the page with one entry for each token. The entry is an upper bound of the log of the factor
    by which the token can scale a difference between two states, for any input. It is less than 0 if the token makes
    differences smaller. Or a value [C, K] with an entry for each token and row of the state, of which the largest is such a
    bound of the token. Where each row of the next state depends on the same row of the state only, an entry bounds the factor
    of its row. `partition="decay"` relies on it.
    """
    return Carried(dims, forgets)


def algorithm(*function: Callable[..., Any], **dims: str | Carried | PerHead) -> Callable[[Callable[..., Any]], Algorithm]:
    """Declare a page. The arguments give the dims of its parameters, such as q="C K", "HV" for a number for each value
    head, "HV K" for a vector, per_head(0.0) for a number that callers may leave out, or carried("K V") for a state.

    The decorated function computes one chunk. It returns its outputs, and then the next value of each state. Its keyword-only
    parameters are numbers that the caller passes, such as scale. TypeRuleError for @algorithm without dims.
    """
    if function:
        name = getattr(function[0], "__name__", function[0])
        raise TypeRuleError(f"@algorithm of {name}: got no dims; accepted: those of each parameter by name, as in "
                            '@algorithm(q="C K", v="C V", S=carried("K V"))')
    return lambda fn: Algorithm(fn, dims)
