"""What stages mean: the table of what is legal when, and passes that refuse programs of another stage."""
import re
from dataclasses import replace
from math import inf

import pytest

from gdn_codegen import targets
from gdn_codegen.derived_pages import derived, find
from gdn_codegen.ir.builder import (
    algorithm,
    carried,
    cumsum,
    exp,
    last,
    log,
    lower,
    maximum,
    per_token,
    row_norm,
    row_sum,
    sigmoid,
    strictly_lower,
    unit_lower_inverse,
    valid,
)
from gdn_codegen.ir.core import Batch, Buffer, Carry, Loop, Op, map_loops, map_ops, walk
from gdn_codegen.ir.ops import OPS
from gdn_codegen.ir.required import missing
from gdn_codegen.ir.stages import LEGAL, RANGES, STAGES, between, features, illegal
from gdn_codegen.ir.types import Tensor, Tile
from gdn_codegen.ir.verify import VerifyError, verify
from gdn_codegen.passes import pipelines
from gdn_codegen.passes.stage import PASSES, StageError, takes
from gdn_codegen.passes.storage.place import place
from gdn_codegen.schedule import Schedule, varied
from gdn_codegen.schedule.contract import Contract
from gdn_codegen.targets import lower as lower_program


@algorithm(q="C K", k="C K", v="C V", g="C", beta="C", a="HV", S=carried("K V"))
def every_op(q, k, v, g, beta, a, S):
    """What a page may write, each once."""
    G = cumsum(valid(maximum(g, -20.0)) + per_token(a))
    D = exp(lower(G[:, None] - G[None, :], fill=-inf))
    n = row_norm(k)
    rate = beta / (1.0 + row_sum(k * k))
    T = unit_lower_inverse(strictly_lower(rate[:, None] * (n @ n.T) * D))
    U = T @ (rate[:, None] * (v - exp(G)[:, None] * (n @ S)))
    o = sigmoid(log(1.0 + abs(-v))) * (exp(G)[:, None] * (q @ S) + (D * (q @ n.T)) @ U)
    S = exp(last(G)) * S + n.T @ (exp(last(G) - G)[:, None] * U)
    return o, S


@algorithm(q="C K", k="C K", v="C V", w="C", S=carried("K V"))
def running_sums(q, k, v, w, S):
    """Sums that exp does not take."""
    W = cumsum(w)
    o = q @ S + W[:, None] * v
    S = S + k.T @ (W[:, None] * v)
    return o, S


FULL = "A_log=bfloat16,beta=sigmoid,g=raw,k=l2norm,q=l2norm,state=vk/pool/checkpoints"
GDN, LARGE, SMALL = find("gated_delta_rule"), {"C": 64, "K": 64, "V": 64}, {"C": 32, "K": 32, "V": 32}
#: target, architecture, page, schedule, sizes, contract: all that pipelines make of programs is in one of these.
BUILDS = [
    ("triton", "", GDN, varied("walk", partition="decay", longest_first=True), {**LARGE, "K": 96}, FULL),
    ("triton", "", GDN, varied("walk", descriptors=True), LARGE, "k=unit,state=pool/in_place"),
    ("triton", "", every_op, varied("fused", v_block=32), LARGE, "strided"),
    ("tilelang", "", every_op, varied("fused"), LARGE, ""),
    ("tilelang", "", GDN, varied("replay", value_heads=2), LARGE, FULL),
    ("tilelang", "", GDN, varied("fused", partition="decay"), LARGE, "state=positions"),
    ("tilelang", "", find("rwkv7"), varied("fused"), SMALL, ""),
    ("triton", "", find("gla"), varied("walk", partition="decay", residuals="@state,@pair"), SMALL, "g=floored"),
    ("triton", "", find("gla"), varied("operand_walk", kernels=(("@gate_sum",), ("@operand",), ("@output", "@state"))), SMALL,
     "g=floored"),
    ("triton", "", find("gla"), varied("operand_walk", k_piece=16, kernels=(("@gate_sum", "@pair"), ("@output", "@state"))),
     SMALL, ""),
    ("tilelang", "sm_90a", GDN, varied("walk", "sm_90a", partition="decay", value_heads=2), LARGE, ""),
    ("tilelang", "sm_90a", find("kimi_delta_attention"), varied("walk_in_turn", "sm_90a"), {**LARGE, "C": 16}, "g=floored"),
    ("tilelang", "sm_90a", find("kimi_delta_attention"), varied("walk_in_turn", "sm_90a", partition="short"),
     {**LARGE, "C": 16}, "g=floored"),
    ("tilelang", "sm_90a", GDN, varied("fused_walk", "sm_90a", partition="decay"), LARGE, FULL),
    ("tilelang", "sm_90a", GDN, varied("fused_walk", "sm_90a", persistent=True, by_length=True), LARGE, FULL),
    ("tilelang", "sm_90a", GDN, varied("walk", "sm_90a", persistent=True), LARGE, ""),
    ("tilelang", "sm_90a", find("gla.gradient"), varied("channel_gradient", "sm_90a", k_block=32), LARGE, ""),
    ("tilelang", "sm_90a", find("kimi_delta_attention"), varied("operand_walk", "sm_90a", if_declined=True), LARGE, "g=floored"),
    ("tilelang", "sm_90a", find("kimi_delta_attention"), varied("operand_walk", "sm_90a", partition="pipelined"), LARGE, ""),
    ("tilelang", "sm_90a", find("kimi_delta_attention"), varied("operand_walk", "sm_90a"), {**LARGE, "C": 32}, ""),
    ("pto", "", GDN, varied("staged", launch="single", inverse_block=32, v_block=16), {**SMALL, "C": 64}, ""),
    ("pto", "", GDN, varied("replay"), SMALL, FULL),
    ("pto", "", every_op, varied("fused", channel_slots=2), SMALL, ""),
    ("pto", "", find("gla.gradient"), varied("fused"), SMALL, ""),
    ("pto", "", find("gated_delta_rule.gradient"), varied("prepared", v_piece=16), SMALL, ""),
    ("triton", "", derived(GDN, "gradient", (("k", "l2norm"),)), varied("gradient"), SMALL, ""),
    ("triton", "", derived(find("gla"), "gradient", (("g", "bounded"),)), varied("channel_gradient"), SMALL, ""),
    ("triton", "", derived(find("gla"), "stored_gradient", (("g", "floored"),)), varied("channel_gradient"), SMALL, ""),
    ("pto", "", running_sums, Schedule("sums", (("W",), ("o", "S"))), SMALL, ""),
    ("triton", "", GDN, varied("fused", v_block=32, state_layout="vk"), {**LARGE, "C": 1}, "state=vk"),
    ("tilelang", "", GDN, varied("fused", v_block=32), {**LARGE, "C": 1}, "state=pool/in_place/slots/accepted/parents"),
    *((target, "", find(f"causal_conv1d{of}"), varied("fused"), SMALL, "")
      for target in ("triton", "tilelang", "pto") for of in ("", ".gradient")),
    ("triton", "", find("causal_conv1d"), varied("fused", kernels=(("@output",), ("@state",))), SMALL, ""),
    ("pto", "", GDN, varied("fused"), {**SMALL, "C": 16}, "state=pool/in_place/slots/accepted"),
]
NAMES = [f"{target}{arch}-{page.name}-{s.name}" for target, arch, page, s, *_ in BUILDS]


@pytest.fixture(scope="module")
def recorded():
    """Of each build, the passes that ran: (name, before, after, context)."""
    out, kept = [], list(pipelines.observers)
    try:
        for target, arch, page, s, sizes, contract in BUILDS:
            steps = []
            pipelines.observers[:] = [lambda *step, steps=steps: steps.append(step)]
            lower_program(page.trace(), target, s, sizes, "bfloat16" if "floored" in contract else "float16", arch,
                          Contract.parse(contract))
            out.append(steps)
    finally:
        pipelines.observers[:] = kept
    return out


def order(stage):
    return list(STAGES).index(stage)


# --- passes ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("n", range(len(BUILDS)), ids=NAMES)
def test_each_pass_refuses_a_program_one_stage_too_early(recorded, n):
    """And says which pass has to run first: one of those that did run."""
    target, arch, *_ = BUILDS[n]
    passes = dict(targets.find(target).lowered_for(arch).passes)
    steps, refused = recorded[n], 0
    for i, (name, before, _, context) in enumerate(steps):
        earlier = next((p for _, p, *_ in reversed(steps[:i]) if p.stage != before.stage), None)
        if earlier is not None:
            with pytest.raises(StageError) as e:
                passes[name](earlier, context)
            sentence = r"pass (\w+): got \w+, a program of stage '(\w+)'; accepted: '(\w+)'.*\. Run (.*) first\."
            run, given, needs, first = re.fullmatch(sentence, str(e.value)).groups()
            assert given == earlier.stage and needs == before.stage and needs in PASSES[run].needs
            assert all(PASSES[x].gives == needs for x in first.split(" or "))
            refused += 1
    assert refused > len(steps) // 2 and steps[-1][2].stage == "checked"


def test_a_pass_that_comes_too_late_says_what_ended_its_stage(recorded):
    _, _, placed, context = next(step for step in recorded[3] if step[0] == "place")
    with pytest.raises(StageError, match=r"pass place: got every_op, a program of stage 'placed'; accepted: 'assigned'\. It "
                                         r"comes too late: place or transfer has ended that stage\."):
        place(placed, context.schedule, context.device)


def test_a_pass_of_a_stage_that_is_none_is_a_defect():
    with pytest.raises(AssertionError):
        takes("nowhere")


def test_every_pass_is_in_a_pipeline_and_every_stage_is_given():
    """A pass that declares itself and never runs would be found here, and a stage that nothing comes to."""
    used = {n for target, arch, *_ in BUILDS for n, _ in targets.find(target).lowered_for(arch).passes}
    assert set(PASSES) - {"memory"} == used
    assert {x.gives for x in PASSES.values() if x.gives} == set(STAGES) - {"traced"}
    assert {n for n, x in PASSES.items() if x.gives == "checked"} == {"check_waits", "check_rings"}


def test_an_entry_of_a_pipeline_is_one_pass_under_its_own_name():
    """So that `verify` runs after every pass, and an observer is told what ran."""
    for target, arch, *_ in BUILDS:
        for name, run in targets.find(target).lowered_for(arch).passes:
            assert [n for n in run.__code__.co_names if n in PASSES] == [name]


def test_stages_only_go_forward(recorded):
    for steps in recorded:
        for name, before, after, _ in steps:
            assert order(after.stage) >= order(before.stage), name


# --- the table -------------------------------------------------------------------------------------------------------
def test_the_table_has_all_ops_and_no_other():
    kinds = {n for n in RANGES if re.fullmatch("[a-z_]+", n)}
    assert kinds == set(OPS)
    for n in RANGES:
        kind, _, name = n.partition(".")
        assert kind not in OPS or not name or name in OPS[kind].attrs, n
    assert sum(len(between(r)) for r in LEGAL) == sum(len(set(between(r))) for r in LEGAL)


def test_the_table_has_nothing_that_no_pipeline_uses(recorded):
    """At the first and the last stage of each range."""
    seen = {(f, p.stage) for steps in recorded for _, *programs, _ in steps for p in programs for f, *_ in features(p)}
    ends = {(name, s) for name, ranges in RANGES.items() for r in ranges.split() for s in (between(r)[0], between(r)[-1])}
    assert not ends - seen, sorted(ends - seen)


def planted(p, name):
    """`p` with that in it, which it need not have."""
    k = p.kernels[0]
    of = lambda **changes: replace(p, kernels=(replace(k, **changes), *p.kernels[1:]))
    op = lambda o: of(body=(o, *k.body))
    kind, _, field = name.partition(".")
    plain = Op("const", "planted", (), (("value", 1.0),), Tile(()))
    if kind in OPS or kind == "*":
        return op(Op("load" if kind == "*" else kind, "planted", (), ((field, 1),) if field else (), Tile(())))
    if kind == "Op":
        return op(replace(plain, type=Tile(("C",), "float16")) if field == "dtype" else replace(plain, **{field: "planted"}))
    values = {"dims": (("V", 32),), "extents": (("V", 32),), "scales": ("planted",), "launch": "single", "offset": 64,
              "optional": True, "strided": True, "cleared": True, "slots": 2, "slices": 2,
              "buffers": (Buffer("planted", "shared", (1,), "float32"),), "agents": ("planted",), "dtype": "float16"}
    change = {field: values.get(field, "planted")}
    if kind == "Program":
        return replace(p, **change)
    if kind == "Kernel":
        return of(**change)
    if kind == "Buffer":
        return of(buffers=(*k.buffers, replace(Buffer("planted", "shared", (1,), "float32"), **change)))
    tensor = Tensor("planted", "workspace", "const", "HV", ())
    if kind == "Tensor":
        return replace(p, tensors=(*p.tensors, replace(tensor, **change)))
    if kind == "Carry":
        return of(body=map_loops(k.body, lambda s: [replace(s, carried=(*s.carried, Carry("a", "b", "c", "d", Tile(()), 2)))]))
    if kind == "Loop":
        return of(body=map_loops(k.body, lambda s: [replace(s, **{field: {"warm_up": "planted", "step": -1}[field]})]))
    what, value = name.split()
    if what == "index":
        return replace(p, tensors=(*p.tensors, replace(tensor, index=value)))
    if what == "batch":
        return of(batch=Batch(2, value))
    return of(grid=value) if what == "grid" else of(body=(*k.body, Loop(value, (), ())))


@pytest.mark.parametrize("stage", STAGES)
def test_what_is_planted_where_it_is_not_legal_is_refused(recorded, stage):
    programs = [p for steps in recorded for _, before, after, _ in steps for p in (before, after) if p.stage == stage]
    with_loop = next(p for p in programs if any(isinstance(s, Loop) for s in p.kernels[0].body))
    refused = 0
    for name, ranges in RANGES.items():
        p = planted(with_loop, name)
        found = [text for text, *_ in illegal(p)]
        text = f"{name} is legal at the stages {ranges}, and the program is {stage}"
        if stage in between(ranges):
            assert text not in found
            continue
        assert text in found
        with pytest.raises(VerifyError, match=" is legal at "):
            verify(p)
        refused += 1
    assert refused
    with pytest.raises(VerifyError, match="stage 'planted' is none of traced, cut"):
        verify(replace(with_loop, stage="planted"))


@pytest.mark.parametrize("decompose, last", [(None, "checked"), (lambda o, b: o.args[0], "typed")])
def test_an_op_from_outside_is_legal_until_it_is_decomposed(recorded, decompose, last):
    outside = OPS["exp"]
    OPS["outside"] = replace(outside, name="outside", decompose=decompose)
    try:
        for stage in STAGES:
            p = next(p for steps in recorded for _, *programs, _ in steps for p in programs if p.stage == stage)
            p = planted(p, "outside")
            assert any("outside" in text for text, *_ in illegal(p)) == (order(stage) > order(last))
    finally:
        del OPS["outside"]
    assert any("outside is legal at the stages (none)" in text for text, *_ in illegal(p))


def test_the_sentence_says_where_and_when():
    p = find("gated_delta_rule").trace()
    says = (r"gated_delta_rule, kernel walk, planted \(no line of the page\): move is legal at the stages "
            r"assigned fed\.\.checked, and the program is traced")
    with pytest.raises(VerifyError, match=says):
        verify(planted(p, "move"))


def test_a_pass_that_sets_the_stage_alone_is_verified():
    hurried = (("hurried", lambda p, c: replace(p, stage="checked")),)
    with pytest.raises(VerifyError, match=r"row_norm is legal at the stages traced\.\.typed, and the program is checked"):
        pipelines.run_passes(every_op.trace(), hurried, targets.find("triton").lowering.device, Schedule("own", (("o", "S"),)),
                             {"C": 16, "K": 32, "V": 32}, "float16")


# --- what a stage requires -------------------------------------------------------------------------------------------
def of_ops(change):
    """A program with each op changed; without those of which nothing is left."""
    return lambda p: p.map_kernels(lambda k: replace(k, body=map_ops(k.body, lambda o: [x for x in [change(k, o)] if x])))


def of_bodies(change):
    return lambda p: p.map_kernels(lambda k: replace(k, body=change(k.body)))


def without_loops(body):
    return tuple(x for s in body for x in (s.body if isinstance(s, Loop) else [s]))


def crossed(k, o):
    """Without the loads from workspaces: an op reads what another core stored there."""
    stored = {x.attr("tensor"): x.args[0] for x in walk(k.body) if x.kind == "store"}
    loaded = {x.out: stored[x.attr("tensor")] for x in walk(k.body) if x.kind == "load" and x.attr("tensor") in stored}
    return o.renamed(loaded)


UNMOVED = lambda k, o: o.renamed({x.out: x.args[0] for x in walk(k.body) if x.kind == "move"}) if o.kind == "matmul" else o
BARE = lambda k, o: replace(o, buffer="") if o.out and o.type.rank and o.kind in ("load", "matmul", "move") else o
#: stages, what is lost, the program without it, the error
LACKS = [
    ("traced", "the kernel", lambda p: replace(p, kernels=()), "has another form than one kernel with one loop"),
    ("traced", "the loop", of_bodies(without_loops), "has another form than one kernel with one loop"),
    ("assigned..checked", "agents", of_ops(lambda k, o: replace(o, agent="")),
     "has the agent '', which the kernel does not have"),
    ("assigned placed..checked", "an agent of warp groups",
     of_ops(lambda k, o: replace(o, agent="block") if k.agents else o), "has the agent 'block', which the kernel does not have"),
    ("transferred..fed", "transfers", of_ops(crossed), r"of (cube|vector) reads \w+ of (cube|vector), not through a workspace"),
    ("fed", "the loop over items", of_bodies(without_loops), "has no loop over items around its other loops"),
    ("fed", "moves of operands", of_ops(UNMOVED), r"reads \w+, which no move has computed"),
    ("placed..checked", "buffers", of_ops(BARE), "has no buffer"),
    ("synchronised..checked", "waits", of_ops(lambda k, o: o if o.kind != "wait" else None),
     r"signals channel \w+, which no op waits for"),
    ("synchronised..checked", "signals", of_ops(lambda k, o: o if o.kind != "signal" else None),
     r"waits for channel \w+, which no op signals"),
    ("synchronised..checked", "all synchronisation",
     of_ops(lambda k, o: None if OPS[o.kind].effect == "sync" else o.with_attrs(channel=None) if o.kind == "load" else o),
     r"reads \w+, and \w+ never waits for \w+"),
]


@pytest.mark.parametrize("stages, what, lose, error", LACKS, ids=[f"{s}-{what}" for s, what, *_ in LACKS])
def test_a_program_without_what_its_stage_requires_is_refused(recorded, stages, what, lose, error):
    """At each of these stages, and only there."""
    refused = set()
    for p in (p for steps in recorded for *_, p, _ in steps):
        found = [text for text, *_ in missing(lose(p))]
        if p.stage not in refused and any(re.fullmatch(f"{error}.*", text) for text in found):
            refused.add(p.stage)
            with pytest.raises(VerifyError, match=re.escape(found[0])):
                verify(lose(p))
    assert refused == set(between(stages))
