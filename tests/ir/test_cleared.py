"""Rows of outputs that no sequence covers: what a program says of them, and what it means."""
from dataclasses import replace

import pytest
import torch
from reference import expected, problem, rms_error

from gdn_codegen.algorithms import find
from gdn_codegen.ir.interpret import Problem, interpret
from gdn_codegen.ir.parser import parse_program
from gdn_codegen.ir.printer import program_text
from gdn_codegen.ir.verify import VerifyError, verify
from gdn_codegen.schedule import named
from gdn_codegen.schedule.contract import PLAIN, Contract
from gdn_codegen.targets import lower

SIZES = {"C": 16, "K": 32, "V": 16}


def lowered(target, schedule="replay", contract=PLAIN):
    return lower(find("gated_delta_rule").trace(), target, named(schedule), SIZES, "float32", contract=contract)


def run(p, x, **given):
    inputs = {n: torch.cat([x[n], x[n].new_full((7, *x[n].shape[1:]), float("nan"))]) for n in ("q", "k", "v", "g", "beta")}
    return interpret(p, Problem(x["lengths"], 1, 2, rest=7, pool=4), {**inputs, "initial_state": x["S"], **given},
                     {"scale": x["scale"]})["o"]


@pytest.mark.parametrize("schedule", ["fused", "staged", "replay"])
def test_kernels_clear_what_they_store(schedule):
    p, x = lowered("triton", schedule), problem([5, 0, 20], 1, 2, 32, 16, torch.float32)
    assert [bool(p.clears(k)) for k in p.kernels] == [False] * (len(p.kernels) - 1) + [True]
    o = run(p, x)
    assert (o[25:] == 0).all() and rms_error(o[:25], expected(x)[0]) < 1e-6
    assert (run(p, x, o=torch.full((32, 2, 16), 3.0))[25:] == 3).all()


def test_sequences_left_out_are_cleared():
    x = problem([5, 17, 20], 1, 2, 32, 16, torch.float32)
    p = lowered("triton", contract=Contract(pool=True, in_place=True))
    S = torch.cat([x["S"], x["S"][:1]])
    o = run(p, x, initial_state=S, state_indices=torch.tensor([0, -1, 2]))
    want = expected(x)[0]
    assert (o[5:22] == 0).all() and (o[42:] == 0).all() and rms_error(o[22:42], want[22:]) < 1e-6


def test_cores_clear_nothing():
    p = lowered("pto", "fused")
    assert not any(t.cleared for t in p.tensors)


def test_what_is_cleared_is_printed_and_verified():
    p = lowered("triton")
    assert "cleared=True" in program_text(p) and parse_program(program_text(p)) == p
    for name in ("q", "final_state"):
        with pytest.raises(VerifyError, match=f"tensor {name} is cleared; only an output of tokens has rows"):
            verify(replace(p, tensors=tuple(replace(t, cleared=t.cleared or t.name == name) for t in p.tensors)))
