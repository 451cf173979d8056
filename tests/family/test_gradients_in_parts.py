"""Walks back over parts of sequences give what one walk gives: the gradients, against torch.autograd in float64."""
from __future__ import annotations

from dataclasses import replace
from itertools import accumulate
from typing import Any

import gradients
import pytest
import torch
from members import Case, drawn
from reference import in_parts
from test_gradients import ACCEPTED, errors

from gdn_codegen.algorithms import find as page_of
from gdn_codegen.algorithms import names
from gdn_codegen.derived_pages import find
from gdn_codegen.devices.sm_90a import SM_90A
from gdn_codegen.ir.core import Loop, Program, loops
from gdn_codegen.ir.interpret import Interpreter, Problem
from gdn_codegen.passes import pipelines
from gdn_codegen.passes.cut.partition import BOUND
from gdn_codegen.prove.happens_before import RaceError
from gdn_codegen.prove.rings import check_rings
from gdn_codegen.runtime.load import function
from gdn_codegen.schedule import ScheduleError, varied
from gdn_codegen.targets import lower

SIZES = {"C": 8, "K": 16, "V": 16}
#: What heads forget: within a chunk, in three, never.
GATES = (-3.0, -0.9, 0.0)
CASE = Case((5 * 8 + 3, 0, 8, 2 * 8, 1), 1, len(GATES), repeat=True)
#: For chunks of 64 tokens: the gates of the second head forget in two chunks.
OF_GROUPS = replace(CASE, lengths=(4 * 64 + 5, 0, 64), value_heads=2)


@pytest.fixture(autouse=True)
def short_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    """Warm-ups are two parts long at most, on any device, so that short sequences have summaries."""
    monkeypatch.setattr("gdn_codegen.passes.cut.partition.longest_warm_up", lambda device: 2)


def lowered(name: str, how: str | None, schedule: str = "gradient", target: str = "triton", sizes: dict[str, int] = SIZES,
            dtype: str = "float32", arch: str = "", kind: str = "gradient", **fields: Any) -> Program:
    plan = varied(schedule, arch, partition=how, **fields)
    return lower(find(f"{name}.{kind}").trace(), target, plan, sizes, dtype, arch)


class Given:
    """Inputs of a page, what its states' program stores of chunks, solutions and inverses among that with random rows past a
    sequence's end, derivatives, and the gradients by torch.autograd.

    gates: what the heads forget, for pages with gates of tokens."""

    def __init__(self, name: str, case: Case = CASE, sizes: dict[str, int] = SIZES, gates: tuple[float, ...] = GATES) -> None:
        self.case, self.numbers = case, page_of(name).scalar_defaults(sizes)
        x = drawn(name, case, page_of(name).trace(), sizes)
        if "g" in x and x["g"].ndim > 1:
            for head, gate in enumerate(gates):
                x["g"][:, head] = gate
        self.inputs, gen = {n: y.double() for n, y in x.items() if n != "S"}, torch.Generator().manual_seed(1)
        self.d_o = torch.randn(sum(case.lengths), case.value_heads, sizes["V"], generator=gen).double()
        self.d_final = torch.randn(x["S"].shape, generator=gen).double()
        states = replace(find(f"{name}.stored_states").trace(), dims=tuple(sizes.items()))
        self.states = Interpreter(states, self.problem(0), self.numbers).run({**self.inputs, "initial_state": x["S"].double()})
        for t in (t for t in find(f"{name}.inverse_states").trace().role("output") if t.index == "slot" and "C" in t.dims):
            for n, (start, length) in enumerate(zip(accumulate(case.lengths, initial=0), case.lengths, strict=False)):
                last, rows = divmod(length, sizes["C"])
                if rows:
                    tile = self.states[t.name][start // sizes["C"] + n + last]
                    for tail in (tile[:, rows:], tile[..., rows:])[:t.dims.count("C")]:
                        tail.copy_(torch.randn(tail.shape, generator=gen))
        self.want = gradients.expected(name, case, x, self.d_o, self.d_final)

    def problem(self, span: int) -> Problem:
        return Problem(list(self.case.lengths), self.case.heads, self.case.value_heads, span)

    def run(self, p: Program, span: int) -> tuple[Interpreter, float]:
        """The interpreter after a run of `p` in parts of `span` chunks, and the largest error of a gradient."""
        given = {**self.inputs, "d_o": self.d_o, "d_final_state": self.d_final}
        for n, y in self.states.items():
            given |= {n: y, f"{n}_vk": y.mT}
        i = Interpreter(p, self.problem(span), self.numbers)
        got = i.run({t.name: given[t.name] for t in p.role("input")})
        return i, max(gradients.relative(gradients.of_input(n, got, want), want) for n, want in self.want.items())


@pytest.mark.parametrize("name", [
    pytest.param(n, marks=[] if n in ("gated_delta_rule", "gla") else
                 [pytest.mark.slow, *[pytest.mark.long] * (n in ("gated_delta_product", "gated_delta_rule_2"))])
    for n in names()])
def test_parts_of_a_walk_back_give_its_gradients(name: str) -> None:
    """From summaries to rounding, with warm-ups to the bound on what they leave out. One kernel, and three."""
    given = Given(name)
    for schedule, span in (("gradient", 1), ("gradient", 2), ("operand_gradient", 1), ("fused", 1)):
        assert given.run(lowered(name, "exact", schedule), span)[1] < 1e-12, (schedule, span)
        if find(name).forgets:
            i, error = given.run(lowered(name, "decay", schedule), span)
            warms_up = (i.memory["d_S_warm_up"] > 0).any()
            assert error < 1e-7 and (warms_up or name == "delta_rule"), (schedule, span)  # that has no gates


@pytest.mark.parametrize("kind, ways", [("solved_gradient", ("exact", "decay")), ("inverse_gradient", ("exact", "decay")),
                                        ("stored_gradient", ("exact",))])
def test_solutions_come_from_memory(kind: str, ways: tuple[str, ...]) -> None:
    """Of a sequence's own tokens alone: rows past its end may hold anything that is finite. Sums of gates that come from memory
    bound no warm-up."""
    given = Given("gated_delta_rule")
    for how in ways:
        assert given.run(lowered("gated_delta_rule", how, kind=kind), 1)[1] < 1e-7, how


def test_a_warm_up_looks_at_the_chunks_after_a_part() -> None:
    """The last tokens of a sequence forget, the first do not. In walks from the first chunk lengths would be others."""
    case = Case((8 * 8 + 3,), 1, 1)
    given = Given("simple_gla", case, gates=(0.0,))
    g = given.inputs["g"]
    g[35:] = -1.5
    given = given_again("simple_gla", given, case)
    i, error = given.run(lowered("simple_gla", "decay"), 1)
    sums = torch.stack([y.sum() for y in g[:, 0].split(8)]).flip(0)
    assert error < 1e-8
    for part in range(1, len(sums)):
        need = next((n for n in range(1, part + 1) if sums[part - n:part].sum() <= -BOUND["float32"]), part)
        slow = 2 * sums[:part].sum() > -BOUND["float32"] * part  # two such chunks would not be enough
        assert i.memory["d_S_warm_up"][part, 0] == (-1 if need > 2 or (need == part and slow) else need), part
    assert set(i.memory["d_S_warm_up"][1:9, 0].tolist()) == {2.0, -1.0}


def given_again(name: str, given: Given, case: Case) -> Given:
    """`given` with states and gradients of its inputs as they are now."""
    states = replace(find(f"{name}.states").trace(), dims=tuple(SIZES.items()))
    given.states = Interpreter(states, given.problem(0), given.numbers).run({**given.inputs, "initial_state": torch.zeros(
        given.d_final.shape)})
    x = {**given.inputs, "S": torch.zeros_like(given.d_final)}
    given.want = gradients.expected(name, case, x, given.d_o, given.d_final)
    return given


def test_a_bound_of_the_wrong_chunks_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above fails for a warm-up length that counts chunks from the first one."""
    of = Interpreter.warm_up_length
    monkeypatch.setattr(Interpreter, "warm_up_length", lambda self, attrs, *rest: of(self, {**attrs, "step": 1}, *rest))
    with pytest.raises(AssertionError):
        test_a_warm_up_looks_at_the_chunks_after_a_part()


@pytest.mark.parametrize("schedule, warm_up", [("gradient", "all"), ("gradient", "state"), ("operand_gradient", "all")])
def test_walks_of_warp_groups(schedule: str, warm_up: str) -> None:
    """Stage by stage. The last chunk of a sequence, which may be ragged, is the first of a warm-up."""
    sizes, seen = {"C": 64, "K": 64, "V": 64}, []
    given = Given("simple_gla", OF_GROUPS, sizes, (-3.0, -0.2))

    def see(name: str, before: Program, p: Program, c: Any) -> None:
        if name in ("partition", "mbarriers", "warm_up_loop"):
            i, error = given.run(p, 1)
            seen.append((name, error))
            assert (i.memory["d_S_warm_up"] > 0).any()
    pipelines.observers.append(see)
    try:
        lowered("simple_gla", "decay", schedule, "tilelang", sizes, "float16", "sm_90a", warm_up=warm_up)
    finally:
        pipelines.observers.remove(see)
    assert [n for n, _ in seen] == ["partition", "mbarriers", "warm_up_loop"] and all(e < 1e-4 for _, e in seen), seen


def test_a_warm_up_of_a_walk_back_needs_its_barriers_for_ragged_tails() -> None:
    """The checker refuses copies of whole tiles in a warm-up that may begin with a ragged tail."""
    p = lowered("gated_delta_rule", "decay", target="tilelang", sizes={"C": 64, "K": 64, "V": 64}, dtype="float16", arch="sm_90a",
                warm_up="state")
    k = next(k for k in p.kernels if sum(1 for _ in loops(k.body)) == 2)
    body = tuple(replace(s, body=tuple(o.with_attrs(tail=None) for o in s.body)) if isinstance(s, Loop) and s.index == "before"
                 else s for s in k.body)
    check_rings(p, SM_90A)
    with pytest.raises(RaceError, match="copied in whole tiles in iteration 0"):
        check_rings(replace(p, kernels=tuple(replace(k, body=body) if x is k else x for x in p.kernels)), SM_90A)


def test_cores_refuse_parts() -> None:
    with pytest.raises(ScheduleError, match="partition='decay'; accepted for pto is None"):
        lowered("gated_delta_rule", "decay", "prepared", "pto", {"C": 16, "K": 16, "V": 16})


@pytest.mark.parametrize("name, target, how", [
    pytest.param(n, t, how, marks=pytest.mark.slow if (n, t) == ("gated_delta_rule", "triton") else pytest.mark.long)
    for n in names() for t in ("triton", "tilelang") for how in ("decay", "exact") if how == "exact" or find(n).forgets])
def test_modules(name: str, target: str, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of one chunk in generated modules: some from warm-ups, some from summaries, gates from 0 to -50. States before chunks
    come from parts, too, where both have warm-ups."""
    pytest.importorskip(target)
    monkeypatch.setattr("test_gradients.function", lambda b: in_parts(function(b), 1))
    case = Case((70, 0, 33, 1), 1, 2, repeat=True)
    states = varied("walk", partition=how) if how == "decay" else "fused_walk"
    found = errors(target, name, case, {"states": states, "gradient": varied("gradient", partition=how)}, chunk=16,
                   head_dim_k=16, head_dim_v=32, dtype="float32")
    assert all(e < ACCEPTED["float32"] for e in found.values()), found
