"""Input forms, as data: what callers pass instead of a page's inputs. A contract names one for an input (`schedule/contract.py`).

Gated DeltaNet's callers pass raw gates, for example: the model's gate x, with A_log and dt_bias of each value head. Then the page
reads -exp(A_log) * softplus(x + dt_bias). `passes/abi/caller_inputs.py` puts a form's value after the load of the input. The same
text, as torch code, is the meaning of a form for `verify` and for the self-check of modules.

`register` adds a form.
"""
from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class InputForm:
    """How an input comes.

    doc: what a generated module says of the input {0}. value: what the page reads where the caller passes x, in the notation of
    pages. heads: tensors that `value` names, with one number for each value head -> what the host passes for None, "" if the
    caller must give one. vectors: those of them that have a vector for each value head if the input has a row for each token.
    rows: whether the form is one of rows, which a pass computes; another form is elementwise.

    drawn: how `verify` and the self-check draw x and the tensors of `heads`, by name, in the notation of pages. `normal` is a
    normal sample, `rate` the mean log decay of a token of the head, without its sign. For x, `page` is what the page would be
    given without the form: log decays below 0, other numbers in (0, 1), rows of norm 1 or normal ones. By default x is `page`
    and a tensor of `heads` is `normal / 2`.
    """

    doc: str
    value: str
    heads: Mapping[str, str] = field(default_factory=dict)
    vectors: tuple[str, ...] = ()
    settings: tuple[str, ...] = ()
    rows: bool = False
    drawn: Mapping[str, str] = field(default_factory=dict)

    def sample(self, name: str) -> str:
        """How x, or the tensor `name` of `heads`, is drawn."""
        return self.drawn.get(name, "page" if name == "x" else "normal / 2")


#: Forms that differ from the page's. The least factor of "linear" is the smallest normal float32.
INPUT_FORMS: dict[str, InputForm] = {
    "linear": InputForm("{0} comes as the factor of which the kernels take the log.", "log(maximum(x, 1.1754943508222875e-38))",
                        drawn={"x": "exp(page)"}),
    "raw": InputForm("{0} comes raw: the kernels take -exp(A_log) softplus({0} + dt_bias).",
                     "-exp(A_log) * softplus(x + dt_bias)", heads={"A_log": "", "dt_bias": "0.0"}, vectors=("dt_bias",),
                     drawn={"x": "2 * normal", "A_log": "log(rate)"}),
    "bounded": InputForm("{0} comes raw: the kernels take lower_bound sigmoid(exp(A_log) ({0} + dt_bias)).",
                         "lower_bound * sigmoid(exp(A_log) * (x + dt_bias))", vectors=("dt_bias",), settings=("lower_bound",),
                         heads={"A_log": "0.0", "dt_bias": "0.0", "lower_bound": "-5.0"},
                         drawn={"x": "2 * normal", "lower_bound": "-2 * rate"}),
    "safe": InputForm("{0} comes raw: the kernels take lower_bound sigmoid(exp(A_log) ({0} + dt_bias)), where lower_bound counts "
                      "as -5 if it is less.", "maximum(lower_bound, -5.0) * sigmoid(exp(A_log) * (x + dt_bias))",
                      vectors=("dt_bias",), settings=("lower_bound",),
                      heads={"A_log": "0.0", "dt_bias": "0.0", "lower_bound": "-5.0"},
                      drawn={"x": "2 * normal", "lower_bound": "-2 * rate"}),
    "floored": InputForm("{0} counts as -5 where it is less.", "maximum(x, -5.0)"),
    "sigmoid": InputForm("{0} comes as it is before a sigmoid.", "sigmoid(x)", drawn={"x": "log(page / (1 - page))"}),
    "twice_sigmoid": InputForm("{0} comes as it is before twice a sigmoid.", "2 * sigmoid(x)",
                               drawn={"x": "log(page / (2 - page))"}),
    "softplus": InputForm("{0} comes as it is before a softplus, and without dt_bias: the kernels take softplus({0} + dt_bias).",
                          "softplus(x + dt_bias)", heads={"dt_bias": "0.0"}, vectors=("dt_bias",),
                          drawn={"x": "2 * normal"}),
    "rectified": InputForm("{0} comes without dt_bias: the kernels take max({0} + dt_bias, 0).", "maximum(x + dt_bias, 0.0)",
                           heads={"dt_bias": "0.0"}, vectors=("dt_bias",), drawn={"x": "normal"}),
    "l2norm": InputForm("{0} comes as it is: the kernels divide its rows by their norms.",
                        "rsqrt(row_sum(x * x) + 1e-6)[:, None] * x", rows=True, drawn={"x": "normal"}),
    "unit": InputForm("{0} has rows of norm 1: warm-up lengths do not need their norms.", "x", rows=True),
}


def reads(form: InputForm) -> str:
    """A torch function, as text: of x and of the form's numbers by name -> what the page reads. x: [T, heads, ...]."""
    from .emit.page import formula
    names = ("x", *form.heads)
    return f"lambda {', '.join(names)}, **_: {formula(form.value, names)}"


def draws(form: InputForm, between: bool = False) -> dict[str, str]:
    """Torch functions, as text, by the name of what each draws, x and the form's numbers: (page, normal, rate) -> a sample.

    between: whether x is drawn for pages that read numbers from 0 to 1, where `page` may be any."""
    from .emit.page import formula
    found = {n: formula(form.sample(n), ("page", "normal", "rate")[n != "x":]) for n in ("x", *form.heads)}
    if between and "page" in form.sample("x"):
        found["x"] = f"(lambda page: {found['x']})(torch.sigmoid(normal))"
    return {n: f"lambda page, normal, rate: {text}" for n, text in found.items()}


def register(name: str, form: InputForm) -> InputForm:
    """Add a form of numbers, for the contracts of builds (`--accept INPUT=NAME`). Returns the form.

    ValueError if the name is not an identifier, is a word of contracts or is taken, if the form has rows, or if one of its texts
    is not an expression over the names that it may use.
    """
    from .ir.page import RESERVED
    from .schedule.contract import DTYPES, STATE_WORDS
    if not isinstance(form, InputForm):
        raise ValueError(f"form: got {type(form).__name__}; accepted: a gdn_codegen.input_forms.InputForm")
    if not _is_name(name) or name in (*DTYPES, *STATE_WORDS, "state", "strided"):
        raise ValueError(f"name: got {name!r}; accepted: an identifier that is no other word of contracts")
    if form.rows:
        raise ValueError("rows: got True; accepted: False, because a pass computes forms of rows")
    known = {n for other in INPUT_FORMS.values() if other != form for n in other.heads}
    for n, default in form.heads.items():
        if not _is_name(n) or n in (*RESERVED, "x", "page", "normal", "rate") or n.startswith(("_", "out_")) or n in known:
            raise ValueError(f"heads: got {n!r}; accepted: a name that neither generated functions nor other forms use")
        if default and not _is_number(default):
            raise ValueError(f"heads: got {default!r} for {n}; accepted: a finite number as text, or an empty text")
    for what, names in (("vectors", form.vectors), ("settings", form.settings)):
        if unknown := sorted(set(names) - set(form.heads)):
            raise ValueError(f"{what}: got {', '.join(unknown)}; accepted: {', '.join(form.heads) or 'none'}, which heads names")
    if unknown := sorted(set(form.drawn) - {"x", *form.heads}):
        raise ValueError(f"drawn: got {', '.join(unknown)}; accepted: {', '.join(('x', *form.heads))}")
    for what, text in (("value", reads), ("drawn", draws)):
        try:
            text(form)
        except ValueError as e:
            raise ValueError(f"{what}: got {e}") from e
    if INPUT_FORMS.setdefault(name, form) != form:
        raise ValueError(f"name: got {name!r}, which another form has; accepted: a name that is free")
    return form


def _is_name(x: object) -> bool:
    return isinstance(x, str) and x.isascii() and x.isidentifier()


def _is_number(x: str) -> bool:
    try:
        return math.isfinite(float(x))
    except ValueError:
        return False
