"""column_pieces: walks in pieces of V, and so gradients of a page with two states, one of which has a gate for each channel."""
from dataclasses import replace

import pytest
import torch
from reference import rms_error

from gdn_codegen.algorithms import find
from gdn_codegen.ir.builder import algorithm, carried, cumsum, exp, last
from gdn_codegen.ir.core import Loop
from gdn_codegen.ir.differentiate import differentiate
from gdn_codegen.ir.interpret import Problem, interpret
from gdn_codegen.passes import pipelines
from gdn_codegen.passes.loops.column_pieces import MANY
from gdn_codegen.runtime.build import Build, lowered
from gdn_codegen.runtime.call import gradient_builds
from gdn_codegen.schedule.schedule import varied
from gdn_codegen.targets import lower

LENGTHS = [1, 0, 20, 40]


@algorithm(a="C K", b="C K", x="C V", f="C K", n="C", X=carried("K V"), Y=carried("K V"))
def two_memories(a, b, x, f, n, X, Y):
    """One forgets by channels, one adds what is weighted."""
    F = cumsum(f)
    out = (a * exp(F)) @ X + a @ Y
    X = exp(last(F))[:, None] * X + (b * exp(last(F)[None, :] - F)).T @ x
    Y = Y + (b * n[:, None]).T @ x
    return out, X, Y


def given(p, sizes):
    gen, slots = torch.Generator().manual_seed(0), sum(LENGTHS) // sizes["C"] + len(LENGTHS)
    rows = {"token": sum(LENGTHS), "slot": slots, "sequence": len(LENGTHS)}
    x = {t.name: torch.randn(rows[t.index], 2, *(sizes[d] for d in t.dims[t.index == "token":]), generator=gen).double() / 4
         for t in p.role("input")}
    return x | {"f": -x["f"].abs()}


def in_tiles(y, tile):
    """What lies in memory in whole tiles, with zeros in their padding."""
    return torch.nn.functional.pad(y, (0, tile["V"] - y.shape[3], 0, tile["K"] - y.shape[2]))


@pytest.mark.parametrize("V", [64, 56])
def test_each_pass_keeps_the_meaning(V):
    """The last of two pieces may have padding."""
    sizes = {"C": 16, "K": 32, "V": V}
    p, problem, seen = differentiate(two_memories.trace()), Problem(LENGTHS, 2, 2), {}
    pipelines.observers.append(see := lambda name, before, after, c: seen.update({name: after}) if before != after else None)
    try:
        lower(p, "pto", varied("prepared", v_piece=32, padded_pieces=True), sizes, "float32")
    finally:
        pipelines.observers.remove(see)
    moved = {o.attr("tensor") for o in seen["column_pieces"].kernels[-1].ops if o.attr("piece")}
    assert {"X_chunks", "Y_chunks"} <= moved
    x = given(p, sizes)
    want = interpret(replace(p, dims=tuple(sizes.items())), problem, x, {})
    for name, q in seen.items():
        chunks = {t.name: in_tiles(x[t.name], q.sizes) for t in q.role("input") if t.index == "slot"}
        got = interpret(q, problem, x | chunks, {})
        for n, y in want.items():
            assert rms_error(got[n], y) < 1e-12, (name, n)


@pytest.mark.slow
@pytest.mark.parametrize("page, columns", [("kimi_delta_attention", 128), ("gla", 64)])
def test_kernels_of_many_ops_have_wider_pieces_where_they_fit(page, columns):
    """For K = V = 256 TileLang's last kernel of KDA's gradient had 676 ops in pieces of 64, and GLA's has 508. The tests' hook
    interprets the programs before and after."""
    b = gradient_builds.asked_of(Build("tilelang", algorithm=page, dtype="bfloat16", head_dim_k=256, head_dim_v=256), True)
    b = next(x.gradient for x in gradient_builds.candidates(b, "cuda", "sm_90a", 16) if not x.gradient.arch)
    last = lowered(b).kernels[-1]
    assert {o.attr("piece")[1] for o in last.ops if o.attr("piece")} == {columns} and len(last.ops) <= MANY


def test_a_walk_has_states_side_by_side():
    """What one becomes depends on the columns of no other, and on products of its own."""
    p = lower(find("gated_delta_rule").trace(), "pto", varied("staged", walk_piece=16), {"C": 32, "K": 32, "V": 32}, "float16",
              upto="column_pieces")
    (k,) = (k for k in p.kernels if k.grid == "sequences")
    (loop,) = (s for s in k.body if isinstance(s, Loop))
    assert [c.type.dims for c in loop.carried] == [("K", 16), ("K", 16)]
    defs = {o.out: o for o in loop.ops if o.out}

    def under(name):
        return {name}.union(*(under(a) for a in defs[name].args)) if name in defs else {name}
    one, two = (under(c.next) for c in loop.carried)
    assert loop.carried[0].name in one - two and loop.carried[1].name in two - one
    assert not any(defs[x].kind == "matmul" or "V" in defs[x].type.dims for x in one & two & set(defs))
    pieces = {o.attr("tensor"): o.attr("piece") for o in k.ops if o.kind in ("load", "store")}
    assert pieces["final_state"] and pieces["U_offset_ws"] and pieces["U_weight_ws"] is None and pieces["k"] is None
