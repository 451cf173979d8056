"""stacked_inverse: an inverse whose tiles stay with the core that multiplies, in stacks of blocks of 16 rows."""
import pytest
import torch
from reference import expected, problem, rms_error

from gdn_codegen.algorithms import find
from gdn_codegen.devices.ascend_a2 import ASCEND_A2
from gdn_codegen.ir.body import Body
from gdn_codegen.ir.core import Kernel, Loop, Program, walk
from gdn_codegen.ir.interpret import Problem, interpret
from gdn_codegen.ir.ops import OPS
from gdn_codegen.ir.types import Tensor
from gdn_codegen.passes.storage.pack import pack
from gdn_codegen.schedule import Schedule, ScheduleError, named, varied
from gdn_codegen.targets import lower


def lowered(chunk=64, dtype="float16", name="staged", upto="", **changes):
    sizes = {"C": chunk, "K": 32, "V": 32}
    return lower(find("gated_delta_rule").trace(), "pto", varied(name, **changes), sizes, dtype, upto=upto)


def run(p, x, exact=True):
    given = {**{n: x[n] for n in ("q", "k", "v", "g", "beta")}, "initial_state": x["S"]}
    return interpret(p, Problem(x["lengths"], x["q"].shape[1], x["v"].shape[1]),
                     {t.name: given[t.name] for t in p.role("input")}, {"scale": x["scale"]}, exact)


def inverse(p):
    (k,) = (k for k in p.kernels if any(o.kind == "insert" for o in walk(k.body)))
    return list(walk(k.body))


@pytest.mark.parametrize("chunk", [32, 64, 128])
def test_between_the_cores_only_stacks_cross(chunk):
    """Of an inverse that is a kernel of its own: four stacks of 16 columns to the core that multiplies, and nothing back."""
    p = lowered(chunk, value_heads=1)
    ops = inverse(p)
    moved = {o.attr("tensor"): o for o in ops if o.kind in ("load", "store")}
    channels = [p.tensor(n) for n in moved if p.tensor(n).index == "block"]
    assert len(channels) == 4 and {t.dims for t in channels} == {("C", 16)} and {t.dtype for t in channels} == {"float16"}
    assert all(o.agent == "cube" for o in ops if o.kind == "load" and p.tensor(o.attr("tensor")).index == "block")
    assert {p.tensor("A_ws").dtype, p.tensor("Tinv_ws").dtype} == {"float16"}
    assert [o.agent for o in ops if o.kind == "store" and o.attr("tensor") == "Tinv_ws"] == ["cube"]


@pytest.mark.parametrize("chunk", [32, 64, 128])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_it_is_the_inverse_and_rounds_as_that_of_the_whole_tile(chunk, dtype):
    x = problem([chunk + 37, 16], 1, 2, 32, 32, getattr(torch, dtype), gate=-0.1)
    stacks, whole, want = lowered(chunk, dtype), lowered(chunk, dtype, inverse_block=0), expected(x)
    exact = run(stacks, x)
    assert rms_error(exact["o"], want[0]) < 1e-11 and rms_error(exact["final_state"], want[1]) < 1e-11
    was, got = run(whole, x, exact=False), run(stacks, x, exact=False)
    assert all(rms_error(got[n], want[i]) < 1.1 * rms_error(was[n], want[i]) for i, n in enumerate(("o", "final_state")))


@pytest.mark.parametrize("chunk, size", [(16, 0), (32, 16), (64, 32), (128, 64)])
def test_float32_takes_half_a_chunk(chunk, size):
    """A product in float32 cannot stay with its core."""
    ops = [o for k in lowered(chunk, "float32", upto="decompose").kernels for o in walk(k.body)]
    assert {o.attr("size") for o in ops if o.kind == "block"} == ({size} if size else set())
    assert not any(o.kind in ("insert", "blocks", "diagonal_stack") for o in ops)


def test_two_inverses_have_a_tile_each():
    """Each is made in place."""
    ops = [o for k in lower(find("gated_delta_product").trace(), "pto", named("fused"), {"C": 32, "K": 32, "V": 32},
                            "float16").kernels for o in walk(k.body)]
    made = [o.buffer for o in ops if o.kind == "full"]
    last = {o.buffer for o in ops if o.kind == "insert"}
    assert made and set(made) == last


def in_place(read_later):
    """A program that puts blocks into a tile, which it may read afterwards."""
    tensors = tuple(Tensor(n, "workspace", "slot", "HV", dims, of) for n, dims, of in (
        ("a", ("C", "C"), "float16"), ("out", ("C", "C"), "float32")))
    b = Body({t.name: t for t in tensors})
    load = b.op("load", tensor="a", agent="cube", name="a")
    sides = [b.op("move", load, space=s, agent="cube", name=f"a_{s}") for s in ASCEND_A2.feeds]
    zeros = b.op("full", dims=("C", "C"), value=0.0, dtype="float16", agent="cube", name="zeros")
    stack = b.op("blocks", load, at=((0, 0), (16, 16)), size=16, agent="cube")
    product = b.op("matmul", *(b.op("move", stack, space=s, agent="cube", name=f"s_{s}") for s in ASCEND_A2.feeds), stacked=True,
                   agent="cube")
    whole = b.op("insert", zeros, product, at=((0, 0), (16, 16)), agent="cube")
    left = b.op("move", zeros if read_later else whole, space="L0A", agent="cube", name="left")
    b.op("store", b.op("matmul", left, sides[1], agent="cube"), tensor="out", agent="cube")
    kernel = Kernel("k", "chunks", (Loop("item", (), b.finish()),))
    return Program("p", "fed", tensors, (kernel,), (), (("C", 32), ("K", 32), ("V", 32)))


def test_what_is_read_later_is_not_overwritten():
    s = Schedule("s", (("x",),))
    (k,) = pack(in_place(False), s, ASCEND_A2).kernels
    home = {o.out: o.buffer for o in walk(k.body)}
    assert home["zeros"] == home[next(o.out for o in walk(k.body) if o.kind == "insert")]
    with pytest.raises(ScheduleError, match="would overwrite zeros, which is read later"):
        pack(in_place(True), s, ASCEND_A2)


def test_meanings():
    x = torch.arange(64.0).reshape(8, 8)
    stack = OPS["blocks"].evaluate({"at": ((4, 0), (0, 4)), "size": 4}, x)
    assert torch.equal(stack, torch.cat([x[4:, :4], x[:4, 4:]]))
    assert torch.equal(OPS["diagonal_stack"].evaluate({"size": 4}, x), torch.cat([x[:4, :4], x[4:, 4:]]))
    back = OPS["insert"].evaluate({"at": ((4, 0), (0, 4))}, torch.zeros(8, 8), stack)
    assert torch.equal(back[4:, :4], x[4:, :4]) and torch.equal(back[:4, 4:], x[:4, 4:]) and not back[:4, :4].any()
    product = OPS["matmul"].evaluate({"stacked": True}, stack, stack)
    assert torch.equal(product, torch.cat([b @ b for b in (x[4:, :4], x[:4, 4:])]))
