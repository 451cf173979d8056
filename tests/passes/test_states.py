"""States as callers' memory holds them: the interpreter in float64 against the recurrence, after every pass (conftest)."""
from dataclasses import replace

import pytest
import torch
from reference import expected, problem, rms_error
from tiers import every

from gdn_codegen.algorithms import find
from gdn_codegen.ir.core import Op, walk
from gdn_codegen.ir.interpret import Interpreter, Problem
from gdn_codegen.ir.verify import VerifyError, verify
from gdn_codegen.passes.abi.caller_states import caller_states
from gdn_codegen.schedule import named
from gdn_codegen.schedule.contract import PLAIN, Contract
from gdn_codegen.targets import OWN, lower

SIZES = {"C": 16, "K": 32, "V": 16}
LENGTHS = [65, 0, 1, 33, 130]
SLOTS, EVERY = 8, 2
#: A slot a sequence of the pool for initial states, and of that for final ones; the fourth is left out.
AT, TO = [6, 0, 3, -1, 2], [1, 4, 7, -1, 0]
CONTRACTS = ["vk", "float16", "vk/bfloat16", "in_place", "vk/pool", "pool/in_place", "checkpoints",
             "vk/bfloat16/pool/in_place/checkpoints", "positions", "vk/pool/positions"]
#: (sequence, chunk) -> its row of checkpoints, for "positions".
ROWS, WIDTH = {(0, 3): 5, (3, 1): 1, (4, 0): 2, (4, 7): 0}, 10


def lowered(text, target="triton", schedule="replay", how=None):
    contract = Contract.parse(f"state={text}") if text else PLAIN
    return lower(find("gated_delta_rule").trace(), target, replace(named(schedule), partition=how), SIZES, "float32",
                 contract=contract)


def lengths_of(x, at):
    return [n if s >= 0 else 0 for n, s in zip(x["lengths"], at, strict=True)]


class Backwards(Interpreter):
    """Parts of a sequence run from the last to the first."""

    def instances(self, parts):
        return reversed(parts)


def run(p, x, text, span=0, kind=Interpreter, at=AT):
    """The program's outputs, and what its memory was before; states as [K, V], whatever the memory."""
    vk, pool = "vk" in text, "pool" in text
    turned = (lambda s: s.transpose(-1, -2)) if vk else (lambda s: s)
    gen = torch.Generator().manual_seed(5)
    given = {n: x[n] for n in ("q", "k", "v", "g", "beta")}
    initial = torch.randn(SLOTS, 2, 32, 16, generator=gen)
    final = torch.full_like(initial, 7.0)
    if pool:
        for n, s in enumerate(at):
            if s >= 0:
                initial[s] = x["S"][n]
        given |= {"state_indices": torch.tensor(at), "final_indices": torch.tensor(TO)}
    else:
        initial, final = x["S"], final[:len(x["lengths"])]
    given |= {"initial_state": turned(initial), "o": torch.full(x["v"].shape, 5.0)}
    if "in_place" not in text:
        given["final_state"] = turned(final)
    rows = SLOTS if "positions" in text else sum(x["lengths"]) // (EVERY * SIZES["C"])
    given["checkpoint_rows"] = torch.tensor([[ROWS.get((n, c), -1) for c in range(WIDTH)] for n in range(len(x["lengths"]))])
    given["state_checkpoints"] = turned(torch.full((rows, 2, 32, 16), 3.0))
    names = {t.name for t in p.tensors}
    run = kind(p, Problem(x["lengths"], 1, 2, span, EVERY, SLOTS, width=WIDTH), {"scale": x["scale"]})
    got = run.run({n: t for n, t in given.items() if n in names})
    for n in ("final_state", "state_checkpoints"):
        if n in got:
            got[n] = turned(got[n])
    return got, initial if "in_place" in text else final


def after_chunks(x, skipped):
    """Row -> the state after its chunk."""
    out = {}
    for (n, chunk), row in ROWS.items():
        start, size = sum(x["lengths"][:n]), min(x["lengths"][n], (chunk + 1) * SIZES["C"])
        if n not in skipped:
            part = {k: x[k][start:start + size] for k in ("q", "k", "v", "g", "beta")}
            out[row] = expected(part | {"lengths": [size], "S": x["S"][n:n + 1], "scale": x["scale"]})[1][0]
    return out


def checkpoints(x):
    """Row -> the state after EVERY, 2 EVERY... whole chunks: final states of prefixes."""
    out, start, step = {}, 0, EVERY * SIZES["C"]
    for n, length in enumerate(x["lengths"]):
        for i in range(length // step):
            cut = slice(start, start + (i + 1) * step)
            part = {k: x[k][cut] for k in ("q", "k", "v", "g", "beta")}
            part |= {"lengths": [(i + 1) * step], "S": x["S"][n:n + 1], "scale": x["scale"]}
            out[start // step + i] = expected(part)[1][0]
        start += length
    return out


def right(p, x, text, **options):
    """Whether all that is stored is what the recurrence stores, and all else is as it was."""
    at = options.get("at", AT)
    got, before = run(p, x, text, **options)
    want_o, want_S = expected(x)
    pool = "pool" in text
    ok, start = True, 0
    left = set(range(SLOTS)) if pool else set()
    for n, length in enumerate(x["lengths"]):
        skipped = pool and at[n] < 0
        rows = got["o"][start:start + length]
        ok &= bool((rows == 5.0).all()) if skipped else rms_error(rows, want_o[start:start + length]) < 1e-8
        slot = (at if "in_place" in text else TO)[n] if pool else n
        if not skipped:
            left -= {slot}
            ok &= rms_error(got["final_state"][slot], want_S[n]) < 1e-8
        start += length
    ok &= all(torch.equal(got["final_state"][s], before[s].double()) for s in left)
    if "checkpoints" in text:
        want, start = checkpoints(x), 0
        for n, length in enumerate(x["lengths"]):
            if pool and at[n] < 0:
                want = {r: s for r, s in want.items() if not start // 32 <= r < start // 32 + length // 32}
            start += length
    elif "positions" in text:
        want = after_chunks(x, {n for n, s in enumerate(at) if pool and s < 0})
    else:
        return ok
    for r, c in enumerate(got["state_checkpoints"]):
        ok &= rms_error(c, want[r]) < 1e-8 if r in want else bool((c == 3.0).all())
    return ok


def inputs(seed=0):
    return problem(LENGTHS, 1, 2, 32, 16, torch.float32, seed=seed)


@pytest.mark.slow
@pytest.mark.parametrize("text, schedule, target", every(3, CONTRACTS, ["replay", "fused", "walk"], OWN))
def test_states_in_callers_memory(text, schedule, target):
    """Each contract with each schedule on one target, and on each target with one schedule. The others are run by hand."""
    assert right(lowered(text, target, schedule), inputs(), text)


@pytest.mark.slow
@pytest.mark.parametrize("text, how", every(2, CONTRACTS, ["exact", "decay"]))
def test_parts_in_any_order(text, how):
    """Parts of a chunk or two, run from the last to the first: what ends a sequence leaves alone what begins it."""
    x = inputs()
    x["g"][:, 0] = -1.0
    for span in (1, 2, 0):
        assert right(lowered(text, how=how), x, text, span=span, kind=Backwards)


def test_plain_programs_are_as_they_were():
    p = find("gated_delta_rule").trace()
    assert caller_states(p, PLAIN) is p and caller_states(p, Contract(state_dtype="bfloat16")) is p
    assert lowered("vk/pool/in_place").skips == "state_indices" and lowered("vk").skips == ""


def test_walk_with_memory_that_lies_as_it_does_turns_nothing():
    p = lowered("vk", schedule="walk")
    moves = [o for k in p.kernels for o in walk(k.body) if o.attr("tensor") in ("initial_state", "final_state")]
    assert len(moves) == 2 and not any(o.attr("transposed") for o in moves)


# --- negative controls -----------------------------------------------------------------------------------------------
class Numbers(Interpreter):
    """Sequence n takes slot n."""

    def place(self, k, t, at, sizes, heads):
        where = super().place(k, t, at, sizes, heads)
        return (at.seq, *where[1:]) if t.at else where


class NoSkip(Interpreter):
    def sequences(self):
        return list(enumerate(self.problem.lengths))


class Early(Interpreter):
    """Checkpoints are stored by walks that begin early too."""

    def store(self, k, o, x, at, sizes):
        if self.p.tensor(o.attr("tensor")).index == "checkpoint":
            at = replace(at, part=0)
        super().store(k, o, x, at, sizes)


@pytest.mark.parametrize("kind", [Numbers, NoSkip])
@pytest.mark.parametrize("text", ["pool", "pool/in_place"])
def test_mutations_of_the_pool_fail(kind, text):
    assert not right(lowered(text), inputs(), text, kind=kind)


class NoRow(Interpreter):
    """A chunk without a row has the last one."""

    def kept(self, t, at):
        return super().kept(t, at) or (SLOTS - 1,)


def test_mutation_of_rows_of_checkpoints_fails():
    p = lowered("positions", how="decay")
    assert right(p, inputs(), "positions", span=1) and not right(p, inputs(), "positions", span=1, kind=NoRow)


def test_mutation_of_checkpoints_fails():
    """A part that begins a chunk early with no state has other states there; it runs after those whose chunk that is."""
    x = inputs()
    x["g"][:] = -1.0
    p = lowered("checkpoints", how="decay")
    assert right(p, x, "checkpoints", span=1)
    assert not right(p, x, "checkpoints", span=1, kind=Early)


def test_without_the_last_kernel_parts_overwrite_where_others_begin():
    """A walk that stores where the sequence began: right in order, wrong in another."""
    x, text = inputs(), "in_place"
    x["g"][:, 0] = -1.0
    p = lowered(text, how="decay")
    assert [k.name for k in p.kernels][-2:] == ["o_S", "S_end"]

    def direct(k):
        body = tuple(replace(o, attrs=(("tensor", "final_state"),)) if isinstance(o, Op) and o.attr("tensor") == "S_end" else o
                     for o in k.body)
        return replace(k, body=body)

    hasty = replace(p, kernels=tuple(direct(k) for k in p.kernels if k.name != "S_end"))
    assert right(hasty, x, text, span=1) and not right(hasty, x, text, span=1, kind=Backwards)


def test_the_verifier_knows_where_states_may_lie():
    p = lowered("pool/in_place")
    for name, change, words in (("initial_state", {"at": "nowhere"}, "lies at 'nowhere'"),
                                ("final_state", {"over": "q"}, "not an input like it")):
        with pytest.raises(VerifyError, match=words):
            verify(replace(p, tensors=tuple(replace(t, **change) if t.name == name else t for t in p.tensors)))
