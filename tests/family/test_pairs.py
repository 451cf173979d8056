"""Pairs of builds: one with short warm-ups, and one that runs only where gates forget too slowly for it."""
from dataclasses import replace

import pytest
import torch
from members import Case, drawn, expected
from reference import rms_error

from gdn_codegen.ir.core import Loop, Op
from gdn_codegen.ir.interpret import Interpreter, Problem
from gdn_codegen.ir.verify import VerifyError, verify
from gdn_codegen.passes.cut.partition import BOUND, SHORT
from gdn_codegen.runtime.build import Build, lowered, render
from gdn_codegen.runtime.call import choose
from gdn_codegen.runtime.call.device import described
from gdn_codegen.runtime.call.request import Call, Request
from gdn_codegen.runtime.call.tables import Extent
from gdn_codegen.runtime.load import cached, module
from gdn_codegen.schedule import Schedule, ScheduleError, varied
from gdn_codegen.schedule.contract import Contract

ARCH, PAGES = "sm_90a", ("kimi_delta_attention", "gated_delta_rule_2", "gla")
LENGTHS = (300, 0, 470)


def pair(page="kimi_delta_attention", accept="g=floored", size=64, layout="bthd", **fields):
    """The second build of a pair, which names the first."""
    about = Build("tilelang", 64, layout, page, dtype="bfloat16", head_dim_k=size, head_dim_v=size, arch=ARCH,
                  contract=Contract.parse(accept))
    first = replace(about, chunk=16, schedule=varied("walk_in_turn", ARCH, partition="short"))
    return replace(about, schedule=varied("operand_walk", ARCH, if_declined=True, **fields), earlier=first)


def ran(b, x, declined, parts=4, **more):
    """The interpreter after a run of the build. declined: what the counter has before; all other memory is NaN."""
    p = lowered(b)
    counter = next(t.name for t in p.tensors if t.index == "counter")
    given = {t.name: x[{"initial_state": "S"}.get(t.name, t.name)] for t in p.role("input")} | {counter: torch.tensor(declined)}
    i = Interpreter(p, Problem(list(LENGTHS), 1, 2, parts), {"scale": b.head_dim_k ** -0.5}, **more)
    got = i.run(given)
    return i, float(i.memory[counter]), (got["o"], got["final_state"])


def inputs(page, b, *gates):
    """Inputs of a case with these log decays of the heads, from the number to half of it."""
    case = Case(LENGTHS)
    x = drawn(page, case, lowered(b), b.sizes)
    random = torch.rand(x["g"].shape, generator=torch.Generator().manual_seed(1))
    x["g"] = torch.tensor(gates, dtype=x["g"].dtype)[:, None] * (0.5 + 0.5 * random.to(x["g"].dtype))
    return x, expected(page, case, x)


@pytest.mark.parametrize("page", PAGES)
def test_calls_that_forget_fast_are_computed_by_the_first(page):
    """In parts of four chunks of 16 tokens, with ragged tails and an empty sequence."""
    b = pair(page)
    x, want = inputs(page, b, -2.0, -0.5)
    _, declined, got = ran(b.earlier, x, float("nan"))
    assert declined == 0 and all(rms_error(y, z) < 5e-3 for y, z in zip(got, want, strict=True))
    _, declined, got = ran(b, x, declined)
    assert declined == 0 and all(y.isnan().all() for y in got)  # nothing is written twice


@pytest.mark.parametrize("fields", [{}, {"partition": "decay"}])
@pytest.mark.parametrize("page", PAGES)
def test_calls_with_a_head_that_forgets_slowly_are_computed_by_the_second(page, fields):
    b = pair(page, **fields)
    x, want = inputs(page, b, -2.0, -0.001)
    _, declined, got = ran(b.earlier, x, float("nan"))
    assert declined == 1 and all(y.isnan().all() for y in got)
    _, declined, got = ran(b, x, declined, parts=2)
    assert declined == 1 and all(rms_error(y, z) < 5e-3 for y, z in zip(got, want, strict=True))


@pytest.mark.parametrize("enough", [True, False])
def test_the_longest_warm_up(enough):
    """Gates that need just as many chunks as a short warm-up has, or one more. A part with fewer chunks before it begins at the
    first token of its sequence, with the initial state."""
    b = pair()
    each = BOUND["bfloat16"] / SHORT
    x, want = inputs("kimi_delta_attention", b, -1.0, -1.0)
    x["g"][:] = -each * (1.001 if enough else 0.93)
    case = Case(LENGTHS)
    want = expected("kimi_delta_attention", case, x)
    _, declined, got = ran(b.earlier, x, float("nan"))
    assert declined == (not enough)
    if enough:
        assert all(rms_error(y, z) < 5e-3 for y, z in zip(got, want, strict=True))
        x["S"] = x["S"] + 1.0
        assert rms_error(ran(b.earlier, x, float("nan"))[2][0][:64], want[0][:64]) > 0.1


def test_bounds_are_computed_before_parts_alone():
    b = pair()
    x, _ = inputs("kimi_delta_attention", b, -2.0, -0.5)
    i, *_ = ran(b.earlier, x, float("nan"), parts=16)
    known = ~i.memory["F_chunk_ws"][:, 0].isnan()  # slots of the sequences: 19 chunks, none, 30 chunks
    assert known.nonzero().flatten().tolist() == [*range(8, 16), *range(300 // 16 + 2 + 8, 300 // 16 + 2 + 16)]
    assert [k.name for k in lowered(b.earlier).kernels] == ["F_chunk", "S_declined", "o_S"]


def test_final_states_over_initial_ones():
    """All kernels that write a result end at once where the call is declined."""
    b = pair(accept="g=floored,state=pool/in_place")
    for x in (b.earlier, b):
        p = lowered(x)
        for k in p.kernels:
            written = {p.tensor(o.attr("tensor")).role for o in k.ops if o.kind == "store"}
            assert "output" not in written or any(o.kind.startswith("return_if_") for o in k.ops), k.name
    assert all(any(o.kind == "return_if_zero" for o in k.ops) for k in lowered(b).kernels)


@pytest.mark.parametrize("change", ["cleared late", "not cleared", "read early", "one does not read it", "read late",
                                    "ends where it is zero"])
def test_the_verifier_knows_the_order_of_a_counter(change):
    p = lowered(pair().earlier)
    first, second, walk = p.kernels

    def without(k, kind):
        return replace(k, body=tuple(s for s in k.body if isinstance(s, Loop) or s.kind != kind))
    end = next(s for s in walk.body if isinstance(s, Op) and s.kind == "return_if_set")
    clear = next(s for s in first.body if isinstance(s, Op) and s.kind == "clear_counter")
    others = without(walk, "return_if_set")
    wrong = {"cleared late": (without(first, "clear_counter"), replace(second, body=(clear, *second.body)), walk),
             "not cleared": (without(first, "clear_counter"), second, walk),
             "read early": (replace(first, body=(*first.body, end.changed(agent=clear.agent))), second, walk),
             "one does not read it": (first, second, others),
             "read late": (first, second, replace(others, body=(*others.body, end))),
             "ends where it is zero": (first, second, replace(others, body=(replace(end, kind="return_if_zero"), *others.body)))}
    with pytest.raises(VerifyError, match="after it writes other memory" if change == "read late" else "is cleared by kernels"):
        verify(replace(p, kernels=wrong[change]))


def test_where_kernels_end():
    """A kernel that sets the counter comes before, so that walks wait for it; a counter of the build before is read at once."""
    b = pair()
    for x, end in ((b.earlier, "t.return_if_set(S_declined)"), (b, "t.return_if_zero(S_declined)")):
        walk = render(x).partition("def o_S_kernel(t):")[2].partition("return o_S_kernel")[0]
        lines = [line.strip() for line in walk.splitlines()]
        at, kernel = lines.index(end), next(n for n, line in enumerate(lines) if line.startswith("with t.kernel("))
        waits = [n for n, line in enumerate(lines) if line == "t.wait_for_earlier_kernels()"]
        assert at < lines.index("if first < T.max(stop, 1):") and waits[0] < at if x is b.earlier else at == kernel + 1


# --- the host --------------------------------------------------------------------------------------------------------
class Launches:
    """A launcher that records what is launched: (kernel, tensors)."""

    def __init__(self):
        self.made = []

    def __call__(self, kernel, instances, sizes, integers, device):
        return lambda tensors, ends, numbers: self.made.append((kernel, tensors, numbers))


@pytest.mark.parametrize("layout, accept", [("bthd", "g=floored"), ("bhtd", "g=floored"), ("bthd", "g=floored,strided")])
def test_a_call_launches_both_with_the_same_tensors(layout, accept, monkeypatch):
    """The counter, the inputs and the results are the same memory; what else the first has is its own. Rows may have gaps if
    kernels take strides, and the caller's memory for o serves both."""
    b = pair(accept=accept, layout=layout)
    m, first = module(b), module(b.earlier)
    launched = Launches()
    for host in (m.HOST, m.HOST.earlier):
        monkeypatch.setattr(host, "launcher", launched)
        monkeypatch.setattr(host, "plans", {})

    def rows(*dims, dtype=torch.bfloat16):
        heads = 3 if "strided" in accept else 2
        wide = torch.ones(*((1, 640, heads) if layout == "bthd" else (1, heads, 640)), *dims, dtype=dtype)
        return wide[:, :, :2] if heads == 3 else wide
    q, k, v, out = (rows(64) for _ in range(4))
    o, final = getattr(m, b.function)(q, k, v, -rows(64, dtype=torch.float32), rows(dtype=torch.float32), output_final_state=True,
                                      scale=0.5, out=out)
    names = [name for name, *_ in launched.made]
    assert names[:3] == ["F_chunk", "S_declined", "o_S"] and len(names) == 5
    of = [dict(zip(x.TABLES.kernel(name)[3], tensors, strict=True))
          for x, (name, tensors, _) in zip((first,) * 3 + (m,) * 2, launched.made, strict=True)]
    assert o is out and of[2]["final_state"] is of[4]["final_state"] is final and of[2]["o"] is of[4]["o"]
    assert of[2]["v"].data_ptr() == of[4]["v"].data_ptr() and launched.made[2][2] == launched.made[4][2] == [0.5]
    if "strided" not in accept:  # the C backend has no bfloat16, so that rows with gaps are copied here
        assert of[2]["v"] is v and of[2]["o"] is o
    assert len({id(x["S_declined"]) for x in of}) == 1 and of[0]["S_declined"].dtype == torch.int32
    assert of[0]["F_chunk_ws"] is of[1]["F_chunk_ws"] is of[2]["F_chunk_ws"]


def test_pairs_with_one_second_build_have_hosts_of_their_own():
    """Two contracts that differ in a promise, which the second build does not use."""
    one, promised = pair(), pair(accept="g=floored,k=unit")
    other = replace(promised, contract=one.contract)
    assert replace(other, earlier=None) == replace(one, earlier=None) and lowered(one.earlier) != lowered(other.earlier)
    assert module(one).HOST is not module(other).HOST and cached(one) != cached(other)  # so verdicts lie apart, too
    assert [module(b).HOST.earlier.tables.name for b in (one, other)] == [one.earlier.name, other.earlier.name]
    assert module(one).HOST.earlier is not module(one.earlier).HOST  # a self-check changes it


@pytest.mark.parametrize("wrong", [
    {"dtype": "float16"}, {"layout": "bhtd"}, {"head_dim_v": 128}, {"algorithm": "gla"}, {"arch": ""},
    {"contract": Contract.parse("g=floored/bfloat16")}, {"schedule": varied("walk_in_turn", ARCH, partition="decay")}])
def test_what_is_no_pair(wrong):
    b = pair()
    with pytest.raises(ValueError, match="earlier: got"):
        replace(b, earlier=replace(b.earlier, **wrong))
    with pytest.raises(ValueError, match="earlier: got"):
        replace(b, schedule="operand_walk")


def test_half_of_a_pair_does_not_run_alone():
    b = pair()
    x = [torch.ones(1, 64, 1, 64, dtype=torch.bfloat16) for _ in range(3)]
    for half in (b.earlier, replace(pair(partition="decay"), earlier=None)):
        with pytest.raises(ValueError, match=r"schedule: got .*; accepted: a build that runs alone"):
            getattr(module(half), half.function)(*x, -torch.ones(1, 64, 1, 64), torch.ones(1, 64, 1))


def test_self_checks_draw_gates_for_both(monkeypatch):
    m = module(pair())
    drawn_fast = []
    monkeypatch.setattr(m.check, "compared", lambda device, heads, packed, given, wanted, fast, first: drawn_fast.append(
        (m.HOST.earlier.part_chunks, m.HOST.earlier.poison, fast)) or {"o": (0.0, 1.0)})
    m.check.errors(torch.device("meta"))
    assert drawn_fast == [(n, True, fast) for n in (1, 2) for _ in range(2) for fast in (False, True)]
    assert (m.HOST.earlier.part_chunks, m.HOST.part_chunks) == (0, 0)
    for accept in ("g=floored", "g=safe/bfloat16,q=l2norm,k=l2norm"):
        problem = module(pair(accept=accept)).check.problem
        x = problem.drawn([200], (2, 2), 1.0, True)
        of_token = problem.read("g", x).amax(-1)
        each = of_token[:192].unflatten(0, (-1, 16)).sum(1)  # of chunks of 16 tokens
        longest = [(each.flip(0).cumsum(0) > -BOUND["bfloat16"]).sum(0) + 1]
        assert longest[0][0] == 1 and 1 < longest[0][1] <= 8, accept


# --- dispatch --------------------------------------------------------------------------------------------------------
def choice_of(tokens, heads, sequences=1, accept="g=floored", packed=False, longest=0, algorithm="kimi_delta_attention", **words):
    request = Request(algorithm=algorithm, target="tilelang", **words)
    extent = Extent(heads, heads, sequences, tokens, packed, longest)
    call = Call(request, torch.bfloat16, torch.device("cuda"), (128, 128), extent, Contract.parse(accept))
    return choose.choice(call, described("NVIDIA H200")).build


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("tokens, heads, sequences, second", [
    (8192, 16, 1, ("operand_walk", "pipelined")), (32768, 4, 1, ("operand_walk", "decay")),
    (32768, 16, 1, ("operand_walk", "pipelined")), (16384, 8, 1, ("operand_walk", "decay")),
    (8192, 24, 1, ("operand_walk", "pipelined")), (4096, 8, 1, ("operand_walk", "pipelined")),
    (2048, 12, 1, ("operand_walk", "pipelined")), (8192, 12, 4, ("operand_walk", None)), (8192, 64, 1, ("walk_in_turn", None))])
def test_which_calls_get_a_pair(tokens, heads, sequences, second):
    b = choice_of(tokens, heads, sequences)
    assert (b.plan.name, b.plan.partition) == second and b.plan.if_declined
    assert (b.earlier.plan.name, b.earlier.plan.partition, b.earlier.chunk) == ("walk_in_turn", "short", 16)
    assert b.earlier.contract == Contract.parse("g=floored")


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("case", [
    {"tokens": 1024, "heads": 64}, {"tokens": 2048, "heads": 11},
    {"tokens": 16384, "heads": 16, "sequences": 8}, {"tokens": 8192, "heads": 16, "accept": ""},
    {"tokens": 8192, "heads": 12, "sequences": 4, "packed": True}, {"tokens": 8192, "heads": 16, "chunk_size": 64},
    {"tokens": 8192, "heads": 16, "batch_invariant": True},
    *({"tokens": 8192, "heads": 16, "accept": f"g=floored,state={word}"} for word in (
        "checkpoints", "pool/positions")),
    *({"tokens": 8192, "heads": 16, "algorithm": f"kimi_delta_attention.{page}"} for page in ("saving", "states"))])
def test_which_calls_do_not(case):
    """Short ones, many walks, gates without a bound, lengths that only the device knows, chunks that callers give, states after
    chunks, and what a gradient reads."""
    assert choice_of(**case).earlier is None


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("tokens, heads, alone", [(4096, 8, "decay"), (2048, 16, "pipelined"), (4096, 12, "pipelined"),
                                                  (8192, 16, None)])
def test_calls_with_inputs_of_a_layer_have_pairs_from_more_tokens_on(tokens, heads, alone):
    """Some head of a model forgets slowly, so that its calls are declined. Log decays as they are have pairs at all of these."""
    b = choice_of(tokens, heads, accept="g=safe/bfloat16,beta=sigmoid/bfloat16,q=l2norm,k=l2norm")
    assert (b.earlier is None) == (alone is not None) and b.plan.partition == (alone or "pipelined")
    assert choice_of(tokens, heads).earlier is not None


@pytest.mark.usefixtures("unchecked")
def test_sequences_stay_whole_where_users_ask_for_it(monkeypatch):
    choose.kept_choice.cache_clear()
    monkeypatch.setenv("GDN_CODEGEN_PARTITION", "0")
    assert choice_of(8192, 16).earlier is None
    choose.kept_choice.cache_clear()


# --- schedules -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name, fields", [
    ("operand_walk", {"if_declined": True, "persistent": True}), ("walk_in_turn", {"if_declined": True, "partition": "short"}),
    ("operand_walk", {"if_declined": 1}), ("operand_walk", {"partition": "shorter"})])
def test_wrong_fields(name, fields):
    with pytest.raises(ScheduleError):
        varied(name, ARCH, **fields)


@pytest.mark.parametrize("target", ["triton", "tilelang", "pto"])
@pytest.mark.parametrize("fields", [{"if_declined": True}, {"partition": "short"}])
def test_targets_without_them(target, fields):
    schedule = replace(varied("fused"), **fields)
    assert isinstance(schedule, Schedule)
    with pytest.raises(ScheduleError, match="accepted"):
        lowered(Build(target, 16, schedule=schedule, head_dim_k=32, head_dim_v=32, heads=(1, 2) if target == "pto" else None))
