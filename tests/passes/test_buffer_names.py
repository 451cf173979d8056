"""A buffer's name says what it holds, under one convention on all targets."""
from itertools import pairwise

import pytest

from gdn_codegen.ir.core import Buffer, Carry, Kernel, Loop, Op, loops, walk
from gdn_codegen.ir.types import Tile
from gdn_codegen.passes.storage.buffer_names import named
from gdn_codegen.runtime.build import Build, lowered
from gdn_codegen.schedule import varied

T = Tile(("C", "V"))
TILE = Buffer("first", "shared", (64, 128), "float32", dims=("C", "V"))
BUILDS = [Build("tilelang", schedule="staged"), Build("tilelang", schedule="replay"),
          Build("tilelang", arch="sm_90a", schedule=varied("fused_walk", "sm_90a", partition="decay")),
          Build("tilelang", arch="sm_90a", schedule="walk"), Build("pto", schedule="staged"), Build("triton", schedule="walk")]


def names(*ops, buffers=(TILE,)):
    """The names of buffers that ops (out, args, buffer) fill, after the pass, in order."""
    body = tuple(Op("add", out, args, (), T, 0, "", buffer) for out, args, buffer in ops)
    k = named(Kernel("k", "chunks", body, buffers=buffers))
    new = {"": "", **{b.name: after.name for b, after in zip(buffers, k.buffers, strict=True)}}
    assert [o.buffer for o in k.body] == [new[b] for *_, b in ops]
    return [b.name for b in k.buffers]


@pytest.mark.parametrize("ops, name", [
    ([("v", (), "first")], "v"),
    ([("v", (), "first"), ("u", ("v", "w"), "first"), ("x", ("u",), "first")], "x"),  # in place
    ([("v", (), "first"), ("t", ("v",), ""), ("u", ("t",), "first")], "u"),  # through an expression
    ([("v", (), "first"), ("u", (), "first")], "v_then_u"),
    ([("v_f16", (), "first"), ("beta_v_f16_shared", (), "first")], "v_then_beta_v"),
    ([("v", (), "first"), ("u", (), "first"), ("w", ("u",), "first")], "v_then_w"),
    ([("v", (), "first"), ("u", (), "first"), ("w", (), "first")], "tile_C_V"),
    ([("v_minus_exp_G_k_S", (), "first"), ("operand_of_S", (), "first")], "tile_C_V"),  # too long
    ([("v", (), "first"), ("u", (), "first"), ("w", (), "first"), ("tile_C_V", (), "")], "tile_C_V_1")])
def test_one_buffer(ops, name):
    assert names(*ops) == [name]


def test_neutral_names_are_numbered_in_order():
    more = (TILE, Buffer("second", "shared", (64,), "float32", dims=("C",)),
            Buffer("third", "shared", (64, 128), "float16", dims=("C", "V")))
    ops = [(f"{x}{b}", (), b) for x in "xyz" for b in ("first", "second", "third")]
    assert names(*ops, buffers=more) == ["tile_C_V_1", "vector_C", "tile_C_V_2"]


def test_a_carried_value_names_its_buffer():
    body = (Op("load", "S_0", (), (), T, 0, "", "S_0"),
            Loop("chunk", (Carry("S", "S_0", "S_next", "S_T", T),), (Op("neg", "S_next", ("S",), (), T, 0, "", "S_0"),)))
    (b,) = named(Kernel("k", "chunks", body, buffers=(Buffer("S_0", "fragment", (64, 128), "float32"),))).buffers
    assert b.name == "S"


@pytest.mark.parametrize("b", BUILDS, ids=lambda b: b.name)
def test_no_name_of_a_value_stands_over_an_unrelated_one(b):
    """A buffer with the name of a value holds, at its end, that value: what it held before, ops update in place."""
    for k in lowered(b).kernels:
        defs = {o.out: o for o in walk(k.body)}  # a warm-up has a loop of its own, with the same names
        ops, carried = [o for o in defs.values() if o.buffer], {c.name for lp in loops(k.body) for c in lp.carried}

        def reads(o, name, defs=defs):
            return any(a == name or (a in defs and not defs[a].buffer and reads(defs[a], name)) for a in o.args)

        assert len({x.name for x in k.buffers}) == len(k.buffers)
        for name in {o.buffer for o in ops} - carried:
            own = [o for o in ops if o.buffer == name]
            if name in defs:
                assert own[-1].out == name and all(reads(y, x.out) for x, y in pairwise(own) if x.out != y.out)
