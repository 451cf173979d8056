"""The parameters that a page declares: dims of inputs, states, and numbers for each head, as text, and how they are refused."""
from __future__ import annotations

import math
from typing import Any

from .ops import TypeRuleError
from .types import Dim


class PerHead:
    """Marks a parameter of `algorithm` as a number or vector for each value head that callers may leave out."""

    def __init__(self, default: float, dims: str) -> None:
        self.default, self.dims = default, dims


class Carried:
    """Marks a parameter of `algorithm` as a state, which each chunk passes to the next."""

    def __init__(self, dims: str, forgets: str) -> None:
        self.dims, self.forgets = dims, forgets


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


def of_input(algorithm: str, name: str, text: Any) -> tuple[str, tuple[Dim, ...]]:
    """The heads and dims of an input. TypeRuleError unless C comes first, or it is a number or vector for each value head."""
    heads, dims = _dims(algorithm, name, text)
    if dims[:1] != ("C",) and not (heads == "HV" and len(dims) < 2):
        raise TypeRuleError(f"@algorithm of {algorithm}: {name}={text!r}; an input has C first, or it is HV, HV K or HV V; a "
                            f"state is carried({text!r})")
    if len(dims) > 2 or "C" in dims[1:]:
        raise TypeRuleError(f"@algorithm of {algorithm}: {name}={text!r}; after C an input has nothing, K or V")
    return heads, dims


def of_state(algorithm: str, name: str, text: Any) -> tuple[Dim, ...]:
    """The dims of a state. TypeRuleError unless they are one or two of K and V."""
    dims = _dims(algorithm, name, text)[1]
    if not 1 <= len(dims) <= 2 or "C" in dims:
        raise TypeRuleError(f"@algorithm of {algorithm}: {name}=carried({text!r}); a state has one or two dims, each K or V, and "
                            "lives from chunk to chunk, so it has no C")
    return dims


def default_of(algorithm: str, name: str, given: PerHead) -> float:
    """The default of a number or vector for each head. TypeRuleError if it is no finite number, or for other dims."""
    if "C" in given.dims.split():
        raise TypeRuleError(f"@algorithm of {algorithm}: {name}={given.dims!r}; accepted with a default: HV, HV K and HV V")
    x = given.default
    if isinstance(x, bool) or not isinstance(x, (int, float)) or not math.isfinite(x):
        raise TypeRuleError(f"@algorithm of {algorithm}: {name}=per_head({x!r}); accepted: a finite number")
    return float(x)
