"""prefetch_vectors: vectors of a walk are loaded one iteration ahead, and results do not change."""
from dataclasses import replace

import pytest
import torch
from reference import expected, problem, rms_error
from tiers import every

from gdn_codegen.algorithms import find
from gdn_codegen.emit.triton import emit
from gdn_codegen.ir.core import Loop, Op, loops, walk
from gdn_codegen.ir.interpret import Problem, interpret
from gdn_codegen.ir.verify import VerifyError, verify
from gdn_codegen.schedule import SCHEDULES, named
from gdn_codegen.targets import lower

SIZES = {"C": 16, "K": 16, "V": 16}
LENGTHS = [5 * 16 + 3, 0, 16, 33, 1]


def lowered(schedule, target="triton", **changes):
    return lower(find("gated_delta_rule").trace(), target, replace(named(schedule), **changes), SIZES, "float32")


def walks(p):
    return [k for k in p.kernels if any(x.index == "chunk" for x in loops(k.body))]


def ahead(k):
    (loop,) = loops(k.body)
    return {o.out for o in loop.body if isinstance(o, Op) and o.attr("ahead")}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_walk_waits_for_no_vector_of_its_own_turn(schedule):
    for k in walks(lowered(schedule)):
        (loop,) = loops(k.body)
        for o in loop.body:
            if o.kind == "load" and o.type.rank < 2:
                assert o.attr("ahead") == 1, (k.name, o.out)
        first = [o for o in k.body if isinstance(o, Op) and o.attr("ahead")]
        assert len(first) == len(ahead(k)) > 0
        n = list(k.body).index(loop)
        assert first == list(k.body[n - len(first):n]), "those of the first iteration stand before the loop"


def test_other_targets_load_in_their_turn():
    assert not any(o.attr("ahead") for k in lowered("walk", "tilelang").kernels for o in walk(k.body))


def test_the_last_entry_of_a_workspaces_vector_is_a_load_of_one_number():
    (k,) = walks(lowered("walk"))
    ops = list(walk(k.body))
    assert "last" not in {o.kind for o in ops}
    assert [o.type.rank for o in ops if o.attr("last")] == [0, 0]
    (fused,) = walks(lowered("fused"))  # its running sum is nobody's workspace
    assert "last" in {o.kind for o in walk(fused.body)}


@pytest.mark.slow
@pytest.mark.parametrize("schedule, how, span", every(2, SCHEDULES, [None, "decay", "exact"], [0, 1, 2]))
def test_it_means_the_same(schedule, how, span):
    x = problem(LENGTHS, 1, 2, 16, 16, torch.float32, gate=-0.3)
    given = {**{n: x[n] for n in ("q", "k", "v", "g", "beta")}, "initial_state": x["S"]}
    got = interpret(lowered(schedule, partition=how), Problem(LENGTHS, 1, 2, span), given, {"scale": x["scale"]})
    want = expected(x)
    assert rms_error(got["o"], want[0]) < 1e-8 and rms_error(got["final_state"], want[1]) < 1e-8


def test_verify_wants_the_same_zeros_in_every_turn():
    """A vector that is zero past the end in the first iteration and not in later ones."""
    p = lowered("fused")
    (k,) = walks(p)
    (loop,) = loops(k.body)
    (c,) = [c for c in loop.carried if c.name == "g"]
    other = next(c.next for c in loop.carried if c.name == "beta")
    body = tuple(o for o in loop.body if o.out != c.next) + (Op("exp", c.next, (other,), (), c.type, agent="block"),)
    broken = replace(k, body=tuple(replace(s, body=body) if isinstance(s, Loop) else s for s in k.body))
    with pytest.raises(VerifyError, match="padding"):
        verify(replace(p, kernels=(broken,)))


def test_warm_ups_are_a_loop_of_their_own():
    """With warm_up="state" the first loop has neither q nor o; without, there is one."""
    text = {e: next(t.body for t in emit(lowered("walk", partition="decay", warm_up=e), "bthd") if t.name == "o_S")
            for e in ("state", "all")}
    loops_ = text["state"].split("for t in range(")[1:]
    assert [x.split(")")[0] for x in loops_] == ["begin, first, C", "first, stop, C"]
    assert "q_ptr" not in loops_[0] and "o_ptr" not in loops_[0] and "q_ptr" in loops_[1] and "o_ptr" in loops_[1]
    assert text["all"].count("for t in range(begin, stop, C)") == 1 and "if t >= first" in text["all"]
