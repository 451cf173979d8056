"""A constant under a maximum or minimum is marked as a bound. Emitters then keep a NaN of the other operand."""
import re
from dataclasses import replace

import pytest

from gdn_codegen.algorithms import FORMS
from gdn_codegen.input_forms import INPUT_FORMS
from gdn_codegen.ir.builder import algorithm, carried, cumsum, exp, last, maximum, row_sum, valid
from gdn_codegen.ir.core import map_ops, walk
from gdn_codegen.passes.algebra.bounds import bounds
from gdn_codegen.runtime.build import Build, lowered
from gdn_codegen.schedule import varied
from gdn_codegen.schedule.contract import Contract
from gdn_codegen.targets import lower


@algorithm(k="C K", v="C V", S=carried("K V"))
def extremes(k, v, S):
    """A page with a bound on either side, and a maximum of two values."""
    low = maximum(row_sum(k), 0.25)
    high = maximum(0.5, row_sum(v))
    both = maximum(low, high)
    o = both[:, None] * (k @ S)
    S = S + k.T @ v
    return o, S


def marks(target):
    """Of each maximum in the lowered kernels: whether each operand is a constant, and the mark."""
    found = set()
    for k in lowered(Build(target, 32, algorithm=extremes, schedule="fused")).kernels:
        kind = {o.out: o.kind for o in k.ops}
        found |= {(*(kind.get(a) == "const" for a in o.args), o.attr("bound")) for o in k.ops
                  if o.kind == "maximum"}
    return found


@pytest.mark.parametrize("target", ["triton", "tilelang"])
def test_constants_and_nothing_else_are_bounds(target):
    found = marks(target)
    assert len(found) > 1 and any(bound is not None for *_, bound in found)
    assert all(bound == (constant.index(True) if any(constant) else None) for *constant, bound in found)


@pytest.mark.parametrize("form", [n for n in FORMS["g"] if re.search(r"(max|min)imum\(", INPUT_FORMS[n].value)])
@pytest.mark.parametrize("target", ["triton", "tilelang"])
def test_numbers_of_forms_are_bounds_too(target, form):
    b = Build(target, 32, algorithm="kimi_delta_attention", schedule="fused", contract=Contract.parse(f"g={form}"))
    ops = {o.out: o for k in lowered(b).kernels for o in walk(k.body) if o.out}
    found = [o for o in ops.values() if o.kind in ("maximum", "minimum")]
    assert found and all(ops[o.args[o.attr("bound", 9)]].kind == "const" for o in found), found


@algorithm(k="C K", v="C V", S=carried("K V"))
def limited(k, v, S, *, limit="0.5"):
    """A page with bounds that the caller gives."""
    o = k @ S
    S = S + maximum(-limit, k).T @ maximum(v, 2 * limit)
    return o, S


@pytest.mark.parametrize("target, text", [
    ("triton", r"tl\.maximum\(-limit, k\S*, propagate_nan=tl\.PropagateNan\.ALL\)"),
    ("tilelang", r"T\.if_then_else\(\s*T\.cast\(k\S* \S* T\.float32\) < minus_limit,\s*minus_limit,\s*T\.cast\(k")])
def test_numbers_of_callers_are_bounds(target, text):
    b = Build(target, 32, algorithm=limited, schedule="fused")
    p = lowered(b)
    found = [o for k in p.kernels for o in walk(k.body) if o.kind == "maximum"]
    assert len(found) == 2 and all(o.attr("bound") is not None for o in found)
    body = "\n".join(k.body for k in b.of.emit(p, b.layout, b.heads))
    assert re.search(text, body), body


def test_cores_need_no_mark():
    assert {bound for *_, bound in marks("pto")} == {None}


@pytest.mark.parametrize("target, plain, kept", [
    ("triton", r"tl\.maximum\(([^()]|\([^()]*\))*NAN\),\s*\)", r"tl\.maximum\(0\.25, row_sums_k, NAN\)"),
    ("tilelang", r"T\.max\(", r"T\.if_then_else\(.* < 0\.25, 0\.25, ")])
def test_emitters_keep_nan_where_the_mark_is(target, plain, kept):
    b = Build(target, 32, algorithm=extremes, schedule="fused")
    text = "\n".join(k.body for k in b.of.emit(lowered(b), b.layout, b.heads)).replace("propagate_nan=tl.PropagateNan.ALL", "NAN")
    assert re.search(kept, text) and re.search(plain, text), text


@algorithm(q="C K", k="C K", v="C V", g="HV C K", S=carried("K V"))
def summed(q, k, v, g, S):
    """A page whose bound only running sums read."""
    G = cumsum(valid(maximum(g, -4.0)))
    o = (q * exp(G)) @ S
    S = exp(last(G))[:, None] * S + (k * exp(last(G)[None, :] - G)).T @ v
    return o, S


@algorithm(q="C K", k="C K", v="C V", g="HV C K", S=carried("K V"))
def read_twice(q, k, v, g, S):
    """A page in which something else reads it as well."""
    bounded = valid(maximum(g, -4.0))
    G = cumsum(bounded)
    o = (q * exp(G)) @ S
    S = exp(last(G))[:, None] * S + (k * exp(last(G)[None, :] - G) * bounded).T @ v
    return o, S


@pytest.mark.parametrize("page, floor, in_turns, least", [(summed, -4.0, True, -4.0), (summed, 4.0, True, None),
                                                          (summed, -4.0, False, None), (read_twice, -4.0, True, None)])
def test_sums_of_walks_in_turn_have_the_bound_of_their_terms(page, floor, in_turns, least):
    """A bound above 0 would count for rows past a sequence's end, too, which are 0."""
    p = lower(page.trace(), "triton", varied("fused"), {"C": 16, "K": 16, "V": 16}, "bfloat16", upto="accumulate")
    (k,) = p.kernels
    k = replace(k, body=map_ops(k.body, lambda o: [o.with_attrs(value=floor) if o.attr("value") == -4.0 else o]))
    (found,) = bounds(replace(p, kernels=(k,)), in_turns).kernels
    (sums,) = [o for o in walk(found.body) if o.kind == "cumsum"]
    assert sums.attr("least") == least and (least is None) == any(o.kind == "maximum" for o in walk(found.body))
