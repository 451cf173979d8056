"""Parts that follow one another: kernels over chunks of the next part run beside the walk of this one."""
import math
import re
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from members import Case, drawn, expected
from reference import rms_error
from test_pairs import choice_of

from gdn_codegen.derived_pages import find as find_page
from gdn_codegen.devices.sm_90a import SM_90A
from gdn_codegen.host.plan import Plan
from gdn_codegen.ir.core import Op
from gdn_codegen.ir.interpret import Interpreter, Problem
from gdn_codegen.ir.parser import parse_program
from gdn_codegen.ir.printer import program_text
from gdn_codegen.ir.verify import VerifyError, verify
from gdn_codegen.passes.launch.overlapping import overlapping
from gdn_codegen.runtime.build import Build, lowered, render
from gdn_codegen.runtime.call.normalise import _check_invariant
from gdn_codegen.runtime.call.request import Request
from gdn_codegen.runtime.load import module
from gdn_codegen.schedule import ScheduleError, varied
from gdn_codegen.schedule.contract import Contract

ARCH = "sm_90a"
PAGES = ("kimi_delta_attention", "gated_delta_rule_2", "rwkv7", "delta_rule", "gated_delta_rule", "gla", "simple_gla",
         "lightning_attention")
LENGTHS = (150, 0, 64, 200, 1)
WAIT, START = "t.wait_for_earlier_kernels()", "t.start_next_kernel()"


def build(page="kimi_delta_attention", accept="", chunk=64, size=64, schedule="operand_walk", **fields):
    fields = {"partition": "pipelined", **fields}
    return Build("tilelang", chunk, algorithm=page, dtype="bfloat16", head_dim_k=size, head_dim_v=size, arch=ARCH,
                 schedule=varied(schedule, ARCH, **fields), contract=Contract.parse(accept))


class Accesses(Interpreter):
    """Records what each launch does: (kernel, part), and (memory, place) of loads and of stores."""

    def __init__(self, *args, **more):
        super().__init__(*args, **more)
        self.made = []

    def kernel(self, k, part=-1):
        self.made.append(((k, part), set(), set()))
        super().kernel(k, part)

    def noted(self, k, o, at, sizes, which):
        t = self.tensors[o.attr("tensor")]
        if later := o.attr("parts_ahead"):
            at = at.to(part=at.part + later)
        if t.index != "block":
            self.made[-1][which].add((t.over or t.name, repr(self.place(k, t, at, sizes, o.attr("heads", 0)))))

    def load(self, k, o, at, sizes):
        self.noted(k, o, at, sizes, 1)
        return super().load(k, o, at, sizes)

    def store(self, k, o, x, at, sizes):
        self.noted(k, o, at, sizes, 2)
        super().store(k, o, x, at, sizes)


def ran(p, x, span, kind=Interpreter, scale=0.125, **more):
    """The interpreter after a run with parts of `span` chunks, and its outputs."""
    given = {t.name: x[{"initial_state": "S"}.get(t.name, t.name)] for t in p.role("input")}
    i = kind(p, Problem(list(LENGTHS), 1, 2, span, rest=3), {"scale": scale}, **more)
    return i, i.run({n: torch.cat([y, y.new_full((3, *y.shape[1:]), float("nan"))]) if p.tensor(n).index == "token" else y
                     for n, y in given.items()})


@pytest.mark.parametrize("page", PAGES)
def test_results_have_the_bits_of_whole_walks(page):
    """And agree with the recurrence over tokens: ragged tails, an empty sequence, one token, parts of one to four chunks."""
    b = build(page)
    p, whole = lowered(b), lowered(replace(b, schedule=replace(b.plan, partition=None)))
    assert all(k.by_part for k in p.kernels) and p.kernels[-1].grid == "parts" and not any(k.by_part for k in whole.kernels)
    case = Case(LENGTHS, repeat=True, gates="slow")
    x = drawn(page, case, p, b.sizes)
    scale = find_page(page).scalar_defaults(b.sizes)["scale"]
    want = ran(whole, x, 0, scale=scale, exact=False)[1]
    for span in (1, 2, 4):
        got = ran(p, x, span, scale=scale, exact=False)[1]
        assert all(torch.equal(got[n], y) for n, y in want.items()), span
    error = 2e-2 if page in ("rwkv7", "delta_rule") else 1e-2
    o, final = expected(page, case, x)
    total = sum(LENGTHS)
    assert (want["o"][total:] == 0).all() and rms_error(want["o"][:total], o) < error
    assert rms_error(want["final_state"], final) < error and len(ran(p, x, 1, Accesses)[0].made) == 4 * len(p.kernels)


@pytest.mark.parametrize("fields", [{}, {"value_heads": 2}, {"agents": "early_outputs", "v_block": 64}, {"stages": 1}])
@pytest.mark.parametrize("page", PAGES[:2])
def test_schedules(page, fields):
    b = build(page, **fields)
    p = lowered(b)
    case = Case(LENGTHS)
    x = drawn(page, case, p, b.sizes)
    got = ran(p, x, 2)[1]
    o, final = expected(page, case, x)
    assert rms_error(got["o"][:-3], o) < 5e-3 and rms_error(got["final_state"], final) < 5e-3  # exact, but for a decay's bounds


@pytest.mark.parametrize("page", PAGES[:3])
def test_a_launch_shares_nothing_with_the_walk_beside_it(page):
    """Blocks of the first kernel of a part start when the walk of the part before has started, and thus all before it has ended.
    So they must touch no memory that this walk writes, and write none that it reads. All other kernels wait for those before."""
    b = build(page)
    p = lowered(b)
    assert p.launch == "overlapping" and [k.start for k in p.kernels] == ["next_part", ""]
    i = ran(p, drawn(page, Case(LENGTHS), p, b.sizes), 1, Accesses)[0]
    beside = 0
    for (_, read, written), ((k, part), mine, stored) in zip(i.made, i.made[1:], strict=False):
        if k.start == "next_part":
            assert part > 0 and not (mine | stored) & written and not stored & read
            beside += bool(stored) and bool(written)
        else:
            assert stored and mine & written  # it reads what it waits for
    assert beside == 3


def test_a_kernel_that_shares_other_memory_waits():
    """A first kernel that also reads the states which walks hand on."""
    p = lowered(build())
    first, walk = p.kernels
    handed = next(o for o in walk.ops if o.kind == "store" and o.attr("parts_ahead"))
    reads = Op("set_if_negative", "", (first.body[0].out,), (("tensor", handed.attr("tensor")),), agent=first.body[0].agent)
    plain = replace(p, launch="kernels", kernels=(replace(first, start=""), walk))
    assert [k.start for k in overlapping(plain, SM_90A).kernels] == ["next_part", ""]
    other = replace(plain, kernels=(replace(plain.kernels[0], body=(*first.body, reads)), walk))
    assert [k.start for k in overlapping(other, SM_90A).kernels] == ["", ""]


def kernels(b):
    """The texts of a module's kernels."""
    return [x.split("    return ", 1)[0] for x in re.split(r"\n(?=def \w+_kernel\(t\))", render(b))[1:]]


@pytest.mark.parametrize("fields", [{}, {"if_declined": True}])
def test_where_blocks_wait(fields):
    """Blocks of the first kernel wait in the first part, then read a counter, then let the next kernel start. The first block
    waits at the end, also where it has no chunk. The walk waits first, and then lets the next part's kernel start."""
    b = build(accept="g=floored", size=128, v_block=64, agents="early_outputs")
    if fields:
        short = replace(b, chunk=16, schedule=varied("walk_in_turn", ARCH, partition="short"))
        b = replace(b, schedule=replace(b.plan, **fields), earlier=short)
    first, walk = kernels(b)
    lines = [line.strip() for line in first[first.index("with t.kernel("):].strip().splitlines()]
    read = ["t.return_if_zero(S_declined)"] if fields else []
    assert lines[1:4 + len(read)] == ["if part_number == 0:", WAIT, *read, START]
    assert lines[-2:] == ["if of_part + hv == 0:", WAIT] and first.count(WAIT) == 2 and first.count(START) == 1
    assert first.splitlines()[-3].startswith(" " * 12 + "if of_part")  # outside of the condition that the chunk has tokens
    waits = walk.index(WAIT)
    assert walk.count(WAIT) == walk.count(START) == 1 and waits < walk.index(START) < walk.index("set_max_nreg")
    assert not re.search(r"\w+_(in|out|ws)\[", walk[walk.index("with t.kernel("):waits])


class Numbers:
    """What the head of a kernel takes of TileLang, for Python's numbers."""

    int32, min, max = "", min, max

    @staticmethod
    def alloc_var(dtype, init):
        return init

    @staticmethod
    def truncdiv(x, y):
        return x // y

    @staticmethod
    def ceildiv(x, y):
        return -(-x // y)


PLACE = r" {12}(outer|block|of_part|n|hv|start|length|size|chunk|slot|part|first|stop) = (.*)"


def places(text, **given):
    """What the head of a kernel computes of an instance's place, by its text; and whether the instance runs."""
    found = {"T": Numbers, "C": 64, "V": 64, "BV": 64, **given}
    for line in text[text.index("with t.kernel("):].splitlines():
        if at := re.fullmatch(PLACE, line):
            found[at[1]] = eval(at[2], found)
        if condition := re.fullmatch(r" {12}if ((?:chunk|first) .*):", line):
            return {**found, "runs": eval(condition[1], found)}
    raise AssertionError(text)


@pytest.mark.parametrize("span", [1, 2, 3, 5])
def test_instances_have_each_chunk_once(span):
    """By the emitted text: one instance of one launch computes a chunk in its slot, and one iteration of the walk reads it."""
    first, walk = kernels(build(v_block=64))
    ends = [0, 150, 150, 214, 414, 415]
    given = {"cu_seqlens": ends, "ends": len(ends), "HV": 2, "H": 2, "L": 415, "batched": 0, "span": span}
    chunks = {(n, c) for n, (a, b) in enumerate(pairwise(ends)) for c in range(-(-(b - a) // 64))}
    seen, walked, parts = [], [], range(-(-415 // (64 * span)))
    for part in parts:
        x = [places(first, instance=i, part_number=part, **given) for i in range((len(ends) - 1) * span * 2)]
        assert {y["hv"] for y in x} == {0, 1} and all(y["slot"] == ends[y["n"]] // 64 + y["n"] + y["chunk"] for y in x)
        now = [(y["n"], y["chunk"]) for y in x if y["runs"] and y["hv"] == 0]
        beside = [places(walk, instance=i, part_number=part, **given) for i in range((len(ends) - 1) * 2)]
        its = [(y["n"], c) for y in beside if y["runs"] and y["hv"] == 0 for c in range(y["first"], y["stop"])]
        assert sorted(now) == sorted(its)  # a walk reads what the launch before it wrote
        assert all(y["part"] == ends[y["n"]] // (64 * span) + y["n"] + part for y in beside)
        seen, walked = seen + now, walked + [y["n"] for y in beside if y["runs"] and y["hv"] == 0 and y["first"] == 0]
    assert sorted(seen) == sorted(chunks) and walked == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("accept", ["state=pool/in_place", "state=vk/bfloat16", "state=checkpoints", "state=pool/positions",
                                    "g=safe/bfloat16,beta=sigmoid/bfloat16,q=l2norm,k=l2norm", "strided"])
def test_contracts(accept):
    """What callers pass changes nothing: each walk stores a final state only for sequences that end, and states after chunks."""
    b = build(accept=accept)
    p, whole = lowered(b), lowered(replace(b, schedule=replace(b.plan, partition=None)))
    gen = torch.Generator().manual_seed(0)
    results = []
    for q, span in ((whole, 0), (p, 1), (p, 2)):
        gen.manual_seed(0)
        problem = Problem(list(LENGTHS), 1, 2, span, every=2, pool=20, width=4)
        i = Interpreter(q, problem, {"scale": 0.125}, exact=False)
        given = {}
        for t in q.role("input"):
            shape = i.shape(t)
            if t.index == "number":
                given[t.name] = torch.tensor([3, 0, 5, 1, 6])
            elif t.index == "numbers":
                given[t.name] = torch.arange(20).reshape(5, 4)
            else:
                x = torch.randn(shape, generator=gen)
                plain = t.name == "g" and "safe" not in accept
                given[t.name] = -x.abs() if plain else x / 8 if "state" in t.name else x
        results.append({n: x.clone() for n, x in i.run(given).items()})
    want = results[0]
    for got in results[1:]:
        assert got.keys() == want.keys() and all(torch.equal(got[n].nan_to_num(7), x.nan_to_num(7)) for n, x in want.items())
    assert all(x.isfinite().any() for x in want.values())


# --- what is refused -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("change, text", [
    ({"schedule": varied("fused_walk", ARCH, partition="pipelined", kernels=(("@output", "@state"),))}, "kernels over sequences"),
    ({"schedule": varied("replay", ARCH, partition="pipelined", kernels=(
        ("@gate_sum", "@inverse"), ("@state", "@solution"), ("@output",)))}, "kernels over chunks, sequences, chunks"),
    ({"arch": "", "schedule": varied("operand_walk", partition="pipelined")}, "pipelined' on"),
    ({"arch": "", "target": "triton", "schedule": varied("operand_walk", partition="pipelined")}, "pipelined' on"),
    ({"arch": "", "target": "pto", "heads": (1, 2), "schedule": varied("replay", partition="pipelined")},
     "'pipelined'; accepted for pto is None")])
def test_other_kernels_and_devices(change, text):
    with pytest.raises(ScheduleError, match=text):
        lowered(replace(build("gated_delta_rule"), **change))


def test_walks_back():
    b = Build("tilelang", 64, algorithm="gated_delta_rule.gradient", dtype="bfloat16", head_dim_k=64, head_dim_v=64, arch=ARCH,
              schedule=varied("gradient", ARCH, partition="pipelined"))
    assert find_page(b.algorithm).trace().walk.step < 0
    with pytest.raises(ScheduleError, match="first chunk to the last"):
        lowered(b)


@pytest.mark.parametrize("fields", [{"persistent": True}, {"by_length": True}, {"longest_first": True}])
def test_fields_that_contradict(fields):
    with pytest.raises(ScheduleError, match=r"pipelined|partition"):
        varied("operand_walk", ARCH, partition="pipelined", **fields)


@pytest.mark.parametrize("which, change", [(0, {"by_part": False}), (1, {"by_part": False}), (1, {"grid": "sequences"})])
def test_the_verifier_knows_that_all_kernels_go_by_parts(which, change):
    p = lowered(build())
    assert parse_program(program_text(p)) == p
    wrong = tuple(replace(k, **change) if n == which else k for n, k in enumerate(p.kernels))
    with pytest.raises(VerifyError, match=r"launches for one part each|accepted"):
        verify(replace(p, kernels=wrong))


# --- the host --------------------------------------------------------------------------------------------------------
class Launches:
    """A launcher that records what is launched: (kernel, instances, sizes)."""

    def __init__(self):
        self.made = []

    def __call__(self, kernel, instances, sizes, integers, device):
        return lambda tensors, ends, numbers: self.made.append((kernel, instances, sizes))


@pytest.fixture
def launched(monkeypatch):
    def make(b, **env):
        for n, x in env.items():
            monkeypatch.setenv(n, x)
        m = module(b)
        host = type(m.HOST)(m.HOST.tables, launcher := Launches(), m.HOST.accepts_view)
        monkeypatch.setattr(m, "HOST", host)

        def run(tokens, rows=1, ends=None):
            def x(*dims, dtype=torch.bfloat16):
                return torch.ones(rows, tokens, 2, *dims, dtype=dtype)
            getattr(m, b.function)(x(64), x(64), x(64), -x(64, dtype=torch.float32), x(dtype=torch.float32), cu_seqlens=ends)
            return launcher.made
        return run
    return make


@pytest.mark.parametrize("chunks, span", [(1, 1), (16, 16), (17, 16), (33, 16), (48, 16), (64, 22), (128, 43), (512, 171)])
def test_the_length_of_a_part(chunks, span, launched):
    """Three parts, but of 16 chunks or more. They cover all chunks, the last one with a token."""
    tokens = 64 * chunks - 63
    made = launched(build())(tokens)
    first, walk = made[0][0], made[1][0]
    parts = -(-chunks // span)
    assert [k for k, *_ in made] == [first, walk] * parts and first != walk
    assert [(instances, sizes[6:]) for _, instances, sizes in made] == [
        x for n in range(parts) for x in ((2 * span, (n, span)), (2, (n, span)))]


def test_rows_and_packs(launched):
    """Each launch is for a part of all sequences. The longest of a pack may have all its tokens."""
    run = launched(build(part_chunks=2))
    run(640, rows=3)
    assert len(made := list(run(0))) == 10 + 2 and made[0][1:] == (3 * 2 * 2, (3, 640, 1, 2, 2, 33, 0, 2))
    made = run(640, ends=torch.tensor([0, 100, 100, 600]))[12:]
    assert len(made) == 10 and made[-1][2][6:] == (4, 2) and made[0][1] == 3 * 2 * 2


@pytest.mark.parametrize("env, parts", [({"GDN_CODEGEN_PARTITION": "0"}, 1), ({"GDN_CODEGEN_PART_CHUNKS": "5"}, 13), ({}, 3)])
def test_what_users_set(env, parts, launched):
    assert len(launched(build(), **env)(4096)) == 2 * parts


@pytest.mark.parametrize("fields", [{}, {"part_chunks": 4}])
@pytest.mark.parametrize("rows, tokens, ends", [(1, 4096, None), (4, 2048, None), (8, 1024, None), (1, 4096, (0, 64, 4096))])
def test_bytes_of_workspaces(rows, tokens, ends, fields, launched):
    """Besides the tiles of chunks a state for each part. Rows have what is reported, and packs no more than that."""
    b = build(**fields)
    launched(b)(tokens, rows, None if ends is None else torch.tensor(ends))
    (plan,) = (host := module(b).HOST).plans.values()
    outputs = len(host.tables.outputs)
    held = sum(math.prod(shape) * dtype.itemsize for shape, dtype in plan.made[outputs:])
    reported = host.workspace_bytes(rows * tokens, rows if ends is None else len(ends) - 1, 2)
    assert held == reported if ends is None else 0.9 * reported < held <= reported
    parts = rows * tokens // (64 * plan.span) + plan.sequences
    assert held - parts * 2 * 64 * 64 * 4 == sum(
        plan.slots * 2 * math.prod(dims) * getattr(torch, dtype).itemsize for _, dims, dtype in host.tables.workspaces)


def test_packs_with_too_many_blocks():
    host = module(build(part_chunks=2 ** 20)).HOST

    def x(*dims, dtype=torch.bfloat16):
        return torch.empty(1, 2 ** 26, 64, *dims, dtype=dtype, device="meta")
    given = (x(64), x(64), x(64), x(64, dtype=torch.float32), x(dtype=torch.float32))
    with pytest.raises(ValueError, match="cu_seqlens: got 70 sequences in 67108864 tokens; accepted: fewer"):
        Plan(host, given, (None,), (None,), torch.zeros(71, dtype=torch.int32, device="meta"), (None,), False)


def test_batch_invariant_calls_take_them():
    """A result has the same bits in parts. Parts that run side by side are refused."""
    for partition in ("pipelined", "decay"):
        plan = replace(build(size=128).plan, partition=partition)
        asked = Request(algorithm="kimi_delta_attention", target="tilelang", schedule=plan, batch_invariant=True)
        if partition == "pipelined":
            _check_invariant(asked)
        else:
            with pytest.raises(ValueError, match="accepted: a schedule without parts that run side by side"):
                _check_invariant(asked)


# --- dispatch --------------------------------------------------------------------------------------------------------
@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("case, partition", [
    ({"tokens": 8192, "heads": 16}, "pipelined"), ({"tokens": 2048, "heads": 12}, "pipelined"),
    ({"tokens": 8192, "heads": 24}, "pipelined"), ({"tokens": 8192, "heads": 8, "sequences": 2}, "pipelined"),
    ({"tokens": 8192, "heads": 16, "packed": True}, "pipelined"),
    ({"tokens": 8192, "heads": 8, "algorithm": "rwkv7"}, "pipelined"),
    ({"tokens": 8192, "heads": 16, "algorithm": "gated_delta_rule_2"}, "pipelined"),
    ({"tokens": 4096, "heads": 8}, "decay"), ({"tokens": 1024, "heads": 16}, None), ({"tokens": 2048, "heads": 24}, None),
    ({"tokens": 8192, "heads": 48}, None), ({"tokens": 8192, "heads": 8, "sequences": 2, "packed": True}, "decay"),
    ({"tokens": 8192, "heads": 16, "chunk_size": 32}, None),
    ({"tokens": 8192, "heads": 16, "algorithm": "kimi_delta_attention.saving"}, "pipelined"),
    ({"tokens": 8192, "heads": 16, "algorithm": "gla"}, "decay"),
    ({"tokens": 8192, "heads": 16, "algorithm": "delta_rule"}, "decay")])
def test_which_calls_have_parts_that_follow_one_another(case, partition):
    """Few walks of a page with a gate for each channel and an inverse, whose sequences are rows or one pack of all tokens."""
    b = choice_of(**{"accept": "", **case})
    assert b.plan.partition == partition
    assert partition != "pipelined" or (b.plan.name, b.plan.v_block, b.plan.agents) == ("operand_walk", 64, "early_outputs")
