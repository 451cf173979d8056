"""Walks whose operands warps compute in turn: one kernel in chunks of 16, for gates with a bound, on Hopper's warp groups."""
import re
from dataclasses import replace
from itertools import groupby

import pytest
import torch
from members import Case, drawn, expected
from reference import rms_error
from test_gate_forms import made

from gdn_codegen.devices.sm_90a import SM_90A
from gdn_codegen.ir.builder import (
    algorithm,
    carried,
    cumsum,
    decayed_product,
    exp,
    last,
    log,
    maximum,
    row_sum,
    strictly_lower,
    unit_lower_inverse,
)
from gdn_codegen.ir.core import loops, map_ops
from gdn_codegen.ir.interpret import Problem, interpret
from gdn_codegen.ir.ops import BY_COLUMNS, ORDER
from gdn_codegen.prove.happens_before import RaceError
from gdn_codegen.prove.rings import check_ring, check_rings
from gdn_codegen.runtime.build import Build, lowered, render
from gdn_codegen.runtime.call import choose
from gdn_codegen.runtime.call.device import Facts
from gdn_codegen.runtime.call.size import size_of
from gdn_codegen.runtime.call.tables import Extent
from gdn_codegen.runtime.load import module
from gdn_codegen.schedule import ScheduleError, varied
from gdn_codegen.schedule.contract import Contract
from gdn_codegen.tools.tune_jobs import model_choice

PAGES = ("kimi_delta_attention", "gated_delta_rule_2", "gla")
SYNC = ("wait", "signal", "fence", "drain", "warp_barrier")


def build(page="kimi_delta_attention", accept="g=floored", chunk=16, K=64, V=64, dtype="bfloat16", **fields):
    return Build("tilelang", chunk, algorithm=page, dtype=dtype, head_dim_k=K, head_dim_v=V, arch="sm_90a",
                 contract=Contract.parse(accept) if accept else Contract(), schedule=varied("walk_in_turn", "sm_90a", **fields))


def walker(b):
    return lowered(b).kernels[-1]


def in_turn(k):
    """The ops of the warps that run iterations in turn, in order."""
    (agent,) = [a for a in k.agents if a.turns > 1]
    return [o for o in k.ops if o.agent == agent.name]


def exponentials(k):
    """How many tiles of exponentials the kernel computes."""
    return sum(o.kind == "exp" and o.type.rank == 2 for o in k.ops)


@pytest.mark.parametrize("gates", ["slow", "mixed"])
@pytest.mark.parametrize("page, fields", [*((x, {}) for x in PAGES), ("kimi_delta_attention", {"residuals": "@update"}),
                                          ("kimi_delta_attention", {"partition": "decay"}), ("delta_rule", {})])
def test_they_compute_the_recurrence(page, fields, gates):
    """As lowered, in the interpreter. Gates below the bound count as the bound."""
    b = build(page, "" if page == "delta_rule" else "g=floored", **fields)
    case, p = Case((37, 0, 70), gates=gates), lowered(b)
    x = drawn(page, case, p, b.sizes)
    want = expected(page, case, {n: y.clamp(min=-5) if n == "g" else y for n, y in x.items()})
    given = {t.name: x[{"initial_state": "S"}.get(t.name, t.name)] for t in p.role("input")}
    got = interpret(p, Problem(list(case.lengths), 1, 2), given, {"scale": 64 ** -0.5})
    for y, z in zip((got["o"], got["final_state"]), want, strict=True):
        assert rms_error(y, z) < 5e-3


@pytest.mark.parametrize("page, narrow", [("kimi_delta_attention", False), ("kimi_delta_attention", True),
                                          ("gated_delta_rule_2", False), ("gla", True)])
def test_what_engines_pass(page, narrow):
    """Raw gates, in 16 bits too, beta before a sigmoid, and rows of q and k that the kernel divides by their norms: sums of
    squares are diagonals of products."""
    sigmoid = {"kimi_delta_attention": ",beta=sigmoid"}.get(page, "")
    b = build(page, f"g=safe{'/bfloat16' if narrow else ''},q=l2norm,k=l2norm{sigmoid}", K=64)
    x, more, want = made(b, "bounded", narrow)
    if sigmoid:
        x["beta"] = torch.log(x["beta"] / (1 - x["beta"]))
    p = lowered(b)
    assert [o for o in p.kernels[0].ops if o.kind == "diagonal"] and len(p.kernels) == 1
    given = {**x, **more, "initial_state": x["S"], "q": 3 * x["q"], "k": 5 * x["k"]}
    got = interpret(p, Problem([17, 0, 40], 1, 2), {t.name: given[t.name] for t in p.role("input")}, {"scale": 64 ** -0.5})
    for y, z in zip((got["o"], got["final_state"]), want, strict=True):
        assert rms_error(y, z) < 5e-3


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("K, V, v_block", [(128, 128, 0), (128, 128, 64), (64, 128, 0), (64, 64, 0)])
@pytest.mark.parametrize("page", PAGES)
def test_one_kernel_has_all(page, K, V, v_block):
    """No operand goes through global memory, and each ring has a slot for each warp that takes iterations in turn."""
    p = lowered(build(page, K=K, V=V, v_block=v_block))
    (k,) = p.kernels
    assert not [t for t in p.tensors if t.role == "workspace"] and {a.name: a.turns for a in k.agents}["operands"] == 4
    assert k.threads == 128 * ((v_block or V) // 64 + 2)
    slots = {b.slots for b in k.buffers if b.space == "shared" and b.name != "o_bf16_shared"}
    assert min(slots) >= 4 and max(slots) <= 8
    assert sum(a.threads * a.registers for a in k.agents if a.threads >= 128) + 128 * 24 <= SM_90A.register_file


def test_columns_come_in_pieces_and_sums_over_them_after():
    """Registers have 16 columns of a tile. What a run of pieces computes is read in it, but for sums over K, which come after."""
    k = walker(build(K=128, V=128))
    ops = [o for o in in_turn(k) if o.buffer or o.kind in SYNC]
    marked = [n for n, o in enumerate(ops) if o.attr(BY_COLUMNS)]
    assert marked == [*range(marked[0], marked[-1] + 1)]
    run = [ops[n] for n in marked]
    assert {o.kind for o in run} >= {"matmul", "move", "exp"} and not {o.kind for o in run} & {*SYNC, "cumsum", "diag_inverse"}
    shape = {b.name: b.shape for b in k.buffers if b.space == "fragment"}
    assert {shape[o.buffer] for o in run if o.buffer in shape} == {(16, 16)}
    sums = {o.out for o in run if o.kind == "matmul"}
    readers = [n for n, o in enumerate(in_turn(k)) if sums & set(o.args)]
    assert min(readers) > max(n for n, o in enumerate(in_turn(k)) if o.attr(BY_COLUMNS))
    assert all(o.attr(ORDER) == "warp_sums" for o in run if o.buffer in shape)


@pytest.mark.parametrize("fields", [{}, {"partition": "decay"}, {"residuals": "@update", "v_block": 64}])
def test_every_op_of_synchronisation_is_needed(fields):
    p = lowered(build(K=128, V=128, **fields))
    k = p.kernels[-1]
    assert {o.kind for o in k.ops if o.agent == "operands"} >= {"warp_barrier", "fence", "wait", "signal"}
    for o in [o for o in k.ops if o.kind in SYNC]:
        less = replace(k, body=map_ops(k.body, lambda x, o=o: [] if x is o else [x]))
        with pytest.raises(RaceError):
            check_rings(replace(p, kernels=(*p.kernels[:-1], less)), SM_90A)


def test_the_checker_knows_turns():
    """A ring with fewer slots than turns lets a warp see an older phase. A barrier of a warp orders nothing of four warps."""
    p = lowered(build(K=128, V=128))
    k = p.kernels[0]
    short = replace(k, buffers=tuple(replace(b, slots=min(b.slots, 3)) for b in k.buffers))
    with pytest.raises(RaceError):
        check_ring(p, short, SM_90A)
    together = replace(k, agents=tuple(replace(a, turns=1) for a in k.agents))
    with pytest.raises(RaceError):
        check_ring(p, together, SM_90A)


def test_a_copy_over_what_threads_wrote_waits_for_their_fence():
    """Running sums overwrite the gates, into whose slot the copy unit writes those of a later chunk."""
    p = lowered(build())
    k = p.kernels[0]
    (sums,) = [o for o in k.ops if o.kind == "cumsum"]
    (load,) = [o for o in k.ops if o.kind == "load" and o.buffer == sums.buffer]
    assert load.agent != sums.agent
    ops = [o for lp in loops(k.body) for o in lp.ops if o.agent == sums.agent]
    (freed,) = [n for n, o in enumerate(ops) if o.kind == "signal" and o.attr("channel") == f"{sums.buffer}_free"]
    assert ops[freed - 1].kind == "fence"


def test_each_warp_stores_its_own_iteration():
    """TileLang is told that each of four warps has all of a tile. A loop that writes such a tile to shared memory would be
    guarded, so that one warp writes for all. None is."""
    tilelang = pytest.importorskip("tilelang")
    b = build(accept="g=safe/bfloat16,beta=sigmoid,q=l2norm,k=l2norm", K=128, V=128)
    launcher, name = module(b)._launcher, lowered(b).kernels[0].name
    target = tilelang.tvm.target.Target({"kind": "cuda", "arch": "sm_90a"})
    with target, tilelang.tvm.transform.PassContext(opt_level=3, config=launcher.passes[name]):
        text = tilelang.lower(launcher.program(name), target=target, enable_device_compile=False).kernel_source
    text = text[text.index("__global__"):]
    operands = text[text.index("warpgroup_reg_alloc<152>"):]
    assert text.count("warp_tile<false") == 3 and not re.search(r"threadIdx\.x\)( >> 5\))? == ", operands)
    assert "__syncwarp" in operands and not re.search("__syncthreads|sync_thread_partial", operands)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("page", PAGES)
def test_a_lane_computes_each_entry_of_a_vector_once(page):
    """Tiles read columns and rows of vectors in shared memory. Otherwise each entry of a tile would compute a norm again."""
    sigmoid = ",beta=sigmoid" if page == "kimi_delta_attention" else ""
    ops = in_turn(walker(build(page, f"g=safe,q=l2norm,k=l2norm{sigmoid}", K=128, V=128)))
    made = {o.out: o for o in ops if o.out}
    read = [made[o.args[0]] for o in ops if o.kind in ("col", "row") and o.args[0] in made]
    assert any(o.kind == "move" for o in read) and all(o.buffer for o in read)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("accept, sums, computed", [
    ("g=floored", r"lambda i,\s*j: T\.if_then_else\(i < rows, G\[[^]]*\], 0\.0\),.*least=-5\.0", False),
    ("g=safe", r"lambda i,\s*j: (?:(?!i < rows).)*T\.sigmoid\((?:(?!i < rows).)*valid_rows=rows", True)])
def test_rows_past_the_end_do_not_count(accept, sums, computed):
    """A load is under a condition. What is computed is not, because that would be a branch for each row."""
    text = render(build(accept=accept, K=128, V=128))
    call = re.search(r"t\.warp_column_cumsum\(.*?\n {20}\)", text, re.S).group()
    assert re.search(sums, call, re.S) and ("least" in call) != computed, call


@pytest.mark.parametrize("accept", ["g=floored", "g=safe"])
def test_a_gate_that_is_no_number_makes_results_none(accept):
    """A bound of terms of running sums keeps a NaN, in its own head and from its chunk on: from token 16, and surely from 20."""
    b = build(accept=accept)
    x, p = drawn("kimi_delta_attention", Case((40,), gates="mixed"), lowered(b), b.sizes), lowered(b)
    x["g"] = x["g"].clone()
    x["g"][20, 0, 3] = float("nan")
    more = {"A_log": torch.zeros(2), "dt_bias": torch.zeros(2, 64), "lower_bound": torch.full((2,), -5.0)}
    given = {t.name: {**x, **more, "initial_state": x["S"]}[t.name] for t in p.role("input")}
    got = interpret(p, Problem([40], 1, 2), given, {"scale": 64 ** -0.5})
    bad = got["o"].isnan().flatten(2).any(-1)
    assert not bad[:16].any() and bad[20:, 0].all() and not bad[:, 1].any()


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("b, why", [
    (build(chunk=64), r"decayed_pairs \(.*let an earlier kernel compute it"),
    (build(chunk=32), "C=16"), (build(accept=""), "C=16"),
    (build("gated_delta_rule", ""), r"cumsum \(G.*let an earlier kernel compute it"),
    (build("gated_delta_rule_2", dtype="float16"), "C=16"),
    (build("rwkv7", "w=floored"), "sums tiles in registers")])
def test_what_warps_cannot_compute_alone_is_refused(b, why):
    with pytest.raises(ScheduleError, match=why):
        lowered(b)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("page, accept", [("gla", "g=floored,k=l2norm,q=l2norm"), ("gla", "g=safe,k=l2norm")])
def test_what_comes_after_a_sum_over_pieces_has_a_run_of_its_own(page, accept):
    """gla scales k by its norm before it is stored. So the run after the norm loads k again."""
    ops = [o for o in in_turn(walker(build(page, accept, K=128, V=128))) if o.buffer]
    runs = [[*some] for marked, some in groupby(ops, lambda o: bool(o.attr(BY_COLUMNS))) if marked]
    assert len(runs) == 2 and any(o.kind == "move" and o.args == ("k_in",) for o in runs[1])
    made = [{o.out for o in run} for run in runs]
    assert not {a for o in runs[1] for a in o.args} & made[0]


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("fields, why", [({"stages": 2}, "stages=2; accepted with agents of 4 turns: 4 or more"),
                                         ({"persistent": True, "kernels": (("@gate_sum",), ("@output", "@state"))},
                                          "persistent=True with warps that run iterations in turn")])
def test_fields_that_do_not_fit_are_refused(fields, why):
    with pytest.raises(ScheduleError, match=why):
        lowered(build(**fields))


@algorithm(r="C K", w="C K", u="C V", f="HV C K", share="C", M=carried("K V", forgets="fading"))
def with_other_names(r, w, u, f, share, M, *, factor="K ** -0.5"):
    """Token t: M <- Diag(exp(f)) M; z = share (u - M^T w); M <- M + w z^T; y = factor M^T r."""
    sums = cumsum(f)
    solve = unit_lower_inverse(strictly_lower(decayed_product(w, w, sums) * share[:, None]))
    z = solve @ (share[:, None] * u - share[:, None] * ((w * exp(sums)) @ M))
    y = factor * (decayed_product(r, w, sums) @ z + (r * exp(sums)) @ M)
    M = M * exp(last(sums))[:, None] + (w * exp(last(sums)[None, :] - sums)).T @ z
    fading = f + log(maximum(1, abs(1 - share * row_sum(w * w))))[:, None]  # noqa: F841  which `forgets` names
    return y, M


def test_a_page_with_other_names_and_another_spelling():
    """One kernel of the same ops, which computes what KDA's page does."""
    fields = dict(chunk=16, dtype="bfloat16", head_dim_k=64, head_dim_v=64, arch="sm_90a")
    b = Build("tilelang", algorithm=with_other_names, contract=Contract(inputs=(("f", "floored"),)),
              schedule=varied("walk_in_turn", "sm_90a"), **fields)
    p, q, case = lowered(b), lowered(build()), Case((37, 0, 70), gates="slow")
    assert len(p.kernels) == 1 and sorted(o.kind for o in in_turn(p.kernels[0]) if o.buffer) == sorted(
        o.kind for o in in_turn(q.kernels[0]) if o.buffer)
    assert exponentials(p.kernels[0]) == exponentials(q.kernels[0]) == 2
    x = drawn("kimi_delta_attention", case, q, b.sizes)
    want = expected("kimi_delta_attention", case, {n: y.clamp(min=-5) if n == "g" else y for n, y in x.items()})
    given = {"r": x["q"], "w": x["k"], "u": x["v"], "f": x["g"], "share": x["beta"], "initial_state": x["S"]}
    got = interpret(p, Problem(list(case.lengths), 1, 2), given, {"factor": 64 ** -0.5})
    for y, z in zip((got["y"], got["final_state"]), want, strict=True):
        assert rms_error(y, z) < 5e-3


@pytest.mark.usefixtures("unchecked")
def test_parts_from_summaries_have_it():
    assert [k.agents != () for k in lowered(build("delta_rule", "", partition="exact")).kernels][-1]


@pytest.mark.usefixtures("unchecked")
def test_other_devices_have_it_as_one_more_kernel():
    """A schedule is data: without warp groups the same groups of values are a kernel of one agent."""
    b = replace(build(chunk=32), arch="", schedule=varied("walk_in_turn"))
    assert [k.agents for k in lowered(b).kernels] == [()] and "T.Kernel" in render(b)


def chosen(walks, tokens, accept="g=floored", chunk=None, dtype="bfloat16", page="kimi_delta_attention", **fields):
    """What dispatch takes for `walks` sequences with one value head, of so many tokens each, on 132 multiprocessors. fields: of
    the call's extent."""
    on, x = Facts("cuda", ("NVIDIA H200",), "sm_90a", 132), Extent(1, 1, walks, walks * tokens, **fields)
    size = size_of(x, "tilelang", on)
    b = Build("tilelang", algorithm=page, dtype=dtype, contract=Contract.parse(accept) if accept else Contract())
    options = choose.modelled(b, "sm_90a", size.few, size.shape_class, chunk, **size.asked)
    found = next(b for b, _ in options if choose.fits(b))
    return found.plan.name, found.chunk, found.plan.v_block


@pytest.mark.usefixtures("unchecked")
def test_dispatch_takes_it_for_many_walks_with_bounded_gates():
    """A call that fixes other chunks keeps them. So do unbounded gates, fewer walks, and float16, whose range is too small for
    the exponents of 16 tokens."""
    whole = ("walk_in_turn", 16, 0)
    assert chosen(67, 2048) == chosen(128, 4096, "g=safe") == chosen(132, 2048, chunk=16) == whole
    assert chosen(400, 512) == chosen(128, 8) == whole
    assert chosen(100, 512, page="gla") == chosen(67, 2048, page="gated_delta_rule_2") == whole
    for x in ((55, 8192), (64, 256), (128, 2048, ""), (128, 2048, "g=raw"), (128, 2048, "g=floored", 64),
              (128, 2048, "g=floored", None, "float16"), (95, 2048, "g=floored", None, "bfloat16", "gla")):
        assert chosen(*x)[:2] == ("operand_walk", 64), x


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("walks, longest, taken", [
    (67, 2048, True), (67, 2200, False), (67, 0, False), (99, 0, False), (100, 0, True), (128, 0, True), (128, 4096, True),
    (128, 5200, False), (400, 15000, True), (400, 16500, False), (64, 2048, True), (64, 2600, False), (64, 0, False)])
def test_long_sequences_have_another_schedule(walks, longest, taken):
    """A call takes as long as its longest walk. Of 67 equal ones each has the tokens of two multiprocessors, of 128 those of one.
    Where only kernels know lengths, many walks have it."""
    assert (chosen(walks, 2048, packed=True, longest=longest)[0] == "walk_in_turn") == taken


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("walks, want", [(49, "operand_walk"), (64, "walk_in_turn"), (128, "walk_in_turn")])
def test_the_tuner_knows_what_a_call_gets(walks, want):
    """It compares candidates with that build."""
    b = Build("tilelang", algorithm="kimi_delta_attention", dtype="bfloat16", contract=Contract.parse("g=floored"))
    assert model_choice(b, Extent(1, 1, walks, walks * 2048), "sm_90a", 132).plan.name == want


@pytest.mark.usefixtures("unchecked")
def test_halves_of_values_have_it_where_each_has_a_multiprocessor():
    """Not where kernels compute gates or norms, which both halves would do."""
    halves = ("walk_in_turn", 16, 64)
    assert chosen(56, 8192) == chosen(66, 512) == chosen(64, 8192, "g=floored,q=unit,k=unit,beta=sigmoid") == halves
    for accept in ("g=safe", "g=floored,q=l2norm,k=l2norm"):
        assert chosen(64, 8192, accept)[0] == "operand_walk" and chosen(67, 8192, accept)[0] == "walk_in_turn"
    assert chosen(64, 8192, page="gla")[0] == "operand_walk"


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("sequences, tokens, HV", [(8, 16384, 16), (40, 40960, 16)])
def test_calls_of_a_hopper_get_it(sequences, tokens, HV):
    """As dispatch sees a call's extent, longest sequences first where there are more walks than multiprocessors."""
    extent, on = Extent(HV, HV, sequences, tokens, packed=sequences > 1), Facts("cuda", ("NVIDIA H200",), "sm_90a", 132)
    size = size_of(extent, "tilelang", on)
    b = Build("tilelang", algorithm="kimi_delta_attention", dtype="bfloat16", contract=Contract(inputs=(("g", "floored"),)))
    options = choose.modelled(b, "sm_90a", size.few, size.shape_class, None, **size.asked)
    found = next(b for b, _ in options if choose.fits(b))
    assert (found.plan.name, found.plan.v_block) == ("walk_in_turn", 0)
    assert size.crowded == (sequences == 40)
    assert not choose.unfit(replace(found, schedule=replace(found.plan, by_length=True)))
