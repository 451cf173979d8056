"""prefetch_parts: the fold loads a part's summaries while those of the part before it are multiplied. One instance goes through
the parts of a head."""
from collections import Counter
from dataclasses import replace

import pytest
import torch
from reference import expected, problem, rms_error

from gdn_codegen.algorithms import find
from gdn_codegen.ir.core import Loop, Op, loops
from gdn_codegen.ir.interpret import Interpreter, Problem
from gdn_codegen.ir.ops import TypeRuleError, infer
from gdn_codegen.ir.types import Tile
from gdn_codegen.schedule import named
from gdn_codegen.targets import lower

TARGETS = (("triton", ""), ("tilelang", "sm_90a"), ("tilelang", ""))
AHEAD = TARGETS[:2]
LENGTHS = [5 * 64 + 3, 0, 64, 3 * 64, 1]


@pytest.fixture(autouse=True)
def short_reach(monkeypatch):
    """Warm-ups are two parts long at most, so that short sequences have summaries."""
    monkeypatch.setattr("gdn_codegen.passes.cut.partition.longest_warm_up", lambda device: 2)


def lowered(target, arch, how="exact", page="gated_delta_rule", upto=""):
    s = replace(named("fused_walk" if arch else "walk", arch), partition=how)
    return lower(find(page).trace(), target, s, {"C": 64, "K": 64, "V": 64}, "bfloat16", arch, upto=upto)


def fold(p):
    (k,) = (k for k in p.kernels if k.name == "S_start")
    return k, next(loops(k.body))


class Counted(Interpreter):
    """Counts the loads and stores of the fold: (kind, tensor, sequence, head, part) -> how many."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.count = Counter()

    def load(self, k, o, at, sizes):
        self.seen(k, o, at)
        return super().load(k, o, at, sizes)

    def store(self, k, o, x, at, sizes):
        self.seen(k, o, at)
        super().store(k, o, x, at, sizes)

    def seen(self, k, o, at):
        if k.name == "S_start" and at.block == 0:
            self.count[o.kind, o.attr("tensor"), at.seq, at.head, at.part + (o.attr("parts_ahead") or 0)] += 1


def drawn(*gates):
    """A problem with a gate a head; a list has a gate for each chunk of the first sequence, and 0 for the others."""
    x = problem(LENGTHS, 1, len(gates), 64, 64, torch.float32)
    for h, gate in enumerate(gates):
        x["g"][:, h] = 0.0 if isinstance(gate, list) else gate
        for chunk, of_chunk in enumerate(gate if isinstance(gate, list) else ()):
            x["g"][64 * chunk:min(64 * chunk + 64, LENGTHS[0]), h] = of_chunk
    return x


def run(p, x, span=1):
    given = {**{n: x[n] for n in ("q", "k", "v", "g", "beta")}, "initial_state": x["S"]}
    i = Counted(p, Problem(x["lengths"], 1, x["v"].shape[1], span), {"scale": x["scale"]}, True)
    return i, i.run({t.name: given[t.name] for t in p.role("input")})


@pytest.mark.parametrize("target, arch", TARGETS)
def test_one_instance_of_a_head_goes_through_its_parts(target, arch):
    """Each summary is loaded once. Before, an instance of each part loaded those of all parts before it."""
    x = drawn(0.0)
    i, got = run(lowered(target, arch), x)
    want = expected(x)
    assert rms_error(got["o"], want[0]) < 1e-11 and rms_error(got["final_state"], want[1]) < 1e-11
    loads = {n: c for n, c in i.count.items() if n[:2] == ("load", "S_offset")}
    assert loads == {("load", "S_offset", seq, 0, part): 1 for seq, parts in ((0, 5), (3, 2)) for part in range(parts)}
    stores = {n[2:] for n in i.count if n[0] == "store"}
    assert stores >= {(0, 0, part) for part in range(1, 6)} | {(3, 0, part) for part in (1, 2)}


@pytest.mark.parametrize("target, arch", TARGETS)
def test_several_runs_of_parts_that_start_from_the_fold(target, arch):
    """With parts between them that start with a warm-up: each run has an instance. What the kernels of the summaries leave out is
    NaN in memory, and reaches no state."""
    x = drawn([0, 0, -3, 0, 0, 0], 0.0, -3.0)
    i, got = run(lowered(target, arch, "decay"), x)
    assert i.memory["S_warm_up"][1:6].T.tolist() == [[-1, -1, 1, 2, -1], [-1] * 5, [1] * 5]
    assert i.memory["S_factor"][:, 2].isnan().all() and i.memory["S_factor"][0, 1].isnan().all()
    want = expected(x)
    assert rms_error(got["o"], want[0]) < 1e-4 and rms_error(got["final_state"], want[1]) < 1e-4
    assert not [n for n in i.count if n[3] == 2 and n[0] == "store"], "a head that forgets has no fold"


@pytest.mark.parametrize("target, arch", AHEAD)
def test_summaries_are_loaded_before_the_product_of_the_part_before(target, arch):
    k, loop = fold(lowered(target, arch))
    ops = [o for o in loop.body if isinstance(o, Op)]
    kinds = [o.kind for o in ops]
    loads = {o.attr("tensor"): n for n, o in enumerate(ops) if o.kind == "load" and o.type.rank == 2}
    assert set(loads) == {"S_factor", "S_offset"} and max(loads.values()) < kinds.index("matmul")
    assert not any(ops[n].args for n in loads.values()), "a load that waits for a number"
    product = ops[kinds.index("matmul")]
    carried = {c.name: c for c in loop.carried}
    factor = carried[product.args[0]]
    by = {o.out: o for o in k.ops}
    assert by[factor.next].kind == "if_negative" and by[by[factor.next].args[1]].attr("tensor") == "S_factor"
    assert kinds.index("matmul") < kinds.index("if_negative"), "the tile would be waited for before the product"
    assert [s.kind for s in k.body[k.body.index(loop) + 1:]].count("matmul") == 1


def test_on_hopper_what_is_loaded_ahead_lies_in_registers():
    """And what the product reads in shared memory: it has one slot, since the registers are the other."""
    k, loop = fold(lowered("tilelang", "sm_90a"))
    space = {b.name: b.space for b in k.buffers}
    ahead = [o for o in loop.ops if o.kind == "load" and o.type.rank == 2]
    kept = [o for o in loop.ops if o.kind == "if_negative" and o.type.dims == ("K", "K")]
    assert len(ahead) == 2 and {space[o.buffer] for o in ahead} == {"fragment"}
    assert [space[o.buffer] for o in kept] == ["shared"]
    assert sum(b.space == "shared" and b.dims == ("K", "K") for b in k.buffers) == 1


def test_other_loops_over_parts_stay():
    """Of a device for which it was not measured, and a fold whose factors are vectors."""
    for target, arch, page in ((*TARGETS[2], "gated_delta_rule"), *((*x, "simple_gla") for x in AHEAD)):
        k, loop = fold(lowered(target, arch, page=page))
        assert not any(o.kind == "if_negative" for o in k.ops) and len(loop.carried) == 1 and isinstance(k.body[-1], Loop)


def test_types():
    assert infer("if_negative", (Tile(()), Tile(("K", "V"), "bfloat16"))) == Tile(("K", "V"), "bfloat16")
    for args in ((Tile(("K",)), Tile(("K", "V"))), (Tile(()),)):
        with pytest.raises(TypeRuleError, match="if_negative takes a number and a tile"):
            infer("if_negative", args)
