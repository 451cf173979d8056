"""Schedules, rewrites and passes. The fixture in conftest checks every pass by interpreting before and after."""
import re
from dataclasses import replace

import pytest
import torch
from reference import expected, in_form, problem, rms_error

from gdn_codegen.algorithms import find
from gdn_codegen.ir.builder import algorithm, carried, exp
from gdn_codegen.ir.core import map_ops, walk
from gdn_codegen.ir.interpret import Problem, interpret
from gdn_codegen.passes.algebra.rewrite import rewrite
from gdn_codegen.passes.cut.kernels import cut
from gdn_codegen.passes.pipelines import run_passes
from gdn_codegen.passes.storage import shared_buffers
from gdn_codegen.passes.storage.stored_values import StoredValues
from gdn_codegen.prove.storage import OverwrittenError
from gdn_codegen.runtime.build import Build
from gdn_codegen.schedule import SCHEDULES, Schedule, ScheduleError, changes, named, varied
from gdn_codegen.schedule.contract import Contract
from gdn_codegen.schedule.schedule import FORMS, VARIANTS
from gdn_codegen.targets import OWN, lower
from gdn_codegen.targets import find as find_target

SIZES = {"C": 32, "K": 16, "V": 32}


def run(p, x, exact=True):
    given = {**{n: x[n] for n in ("q", "k", "v", "g", "beta")}, "initial_state": x["S"]}
    return interpret(p, Problem(x["lengths"], x["q"].shape[1], x["v"].shape[1]),
                     {t.name: given[t.name] for t in p.role("input")}, {"scale": x["scale"]}, exact)


def lowerings():
    """Each form, or other inverse, with each schedule on one target, so that each target has each of them; the rest is long."""
    for i, way in enumerate([*((form, "substitution") for form in FORMS), ("direct", "doubling")]):
        for j, name in enumerate(SCHEDULES):
            for n, target in enumerate(OWN):
                yield pytest.param(*way, name, target, marks=pytest.mark.long if (i + j + n) % len(OWN) else ())


@pytest.mark.slow
@pytest.mark.parametrize("form, inverse, name, target", list(lowerings()))
def test_lowered_programs_are_the_recurrence(target, name, form, inverse):
    x = problem([33, 0, 5], 1, 2, 16, 32, torch.float16, gate="mixed")
    p = lower(find("gated_delta_rule").trace(), target, replace(in_form(named(name), form), inverse=inverse), SIZES, "float16")
    got, (o, S) = run(p, x), expected(x)
    assert rms_error(got["o"], o) < 1e-11 and rms_error(got["final_state"], S) < 1e-11


@pytest.mark.parametrize("size", [16, 128])
@pytest.mark.parametrize("place", ["canonical", "caller_inputs", "masks"])
def test_a_pass_that_changes_what_is_computed_is_found(place, size):
    """By the check of conftest: of a small state at once, of a wide one at the end, or before what callers pass changes."""
    def wrong(p, context):
        return p.map_kernels(lambda k: replace(k, body=map_ops(k.body, lambda o: [
            replace(o, kind="maximum") if o.kind == "add" and o.type.dims == ("K", "V") else o])))
    t, contract = find_target("triton").lowered_for(""), Contract.parse("beta=sigmoid,state=vk/bfloat16/pool/in_place")
    passes = [x for n, f in t.passes for x in ((n, f), *([("wrong", wrong)] if n == place else []))]
    with pytest.raises(AssertionError, match="wrong changed" if size == 16 else
                       f"up to {'caller_states' if place == 'canonical' else 'single_launch'} changed"):
        run_passes(find("gated_delta_rule").trace(), tuple(passes), t.device, named("fused"), {**SIZES, "K": size, "V": size},
                   "float16", contract)


@pytest.mark.slow
@pytest.mark.parametrize("dtype, tolerance", [("float16", 1e-3), ("bfloat16", 5e-3), ("float32", 1e-6)])
@pytest.mark.parametrize("name", SCHEDULES)
def test_rounding_stays_within_bounds(name, dtype, tolerance):
    x = problem([70], 1, 2, 16, 32, getattr(torch, dtype))
    p = lower(find("gated_delta_rule").trace(), "triton", named(name), SIZES, dtype)
    got, (o, S) = run(p, x, exact=False), expected(x)
    assert rms_error(got["o"], o) < tolerance and rms_error(got["final_state"], S) < tolerance


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_what_forms_lose_by_rounding(dtype):
    """What the ones on the inverse's diagonal multiply is rounded, with beta in "split", and not in "unit"."""
    x, loses = problem([512], 1, 2, 64, 64, getattr(torch, dtype), gate=-0.02, initial=False), {}
    for form in ("split", "direct", "unit"):
        plan = Schedule("own", (("G", "Tinv"), ("o", "S")), form=form)
        p = lower(find("gated_delta_rule").trace(), "tilelang", plan, {"C": 64, "K": 64, "V": 64}, dtype)
        got, want = run(p, x, exact=False), expected(x)
        loses[form] = [rms_error(got[n], y) for n, y in zip(("o", "final_state"), want, strict=True)]
    for at in (0, 1):
        assert loses["unit"][at] < 0.92 * min(loses["direct"][at], loses["split"][at])


@pytest.mark.parametrize("inverse", ["substitution", "doubling"])
@pytest.mark.parametrize("chunk", [64, 128])
def test_equal_keys_do_not_lose_the_inverse(inverse, chunk):
    """beta = 1, g = 0 and one key for all tokens: powers of A grow as binomials, the inverse does not."""
    x = problem([chunk], 1, 1, 16, 16, torch.float32, gate=0.0, beta=1.0, same_keys=True)
    s = replace(named("fused"), inverse=inverse)
    target = "tilelang" if inverse == "substitution" else "triton"
    p = lower(find("gated_delta_rule").trace(), target, s, {"C": chunk, "K": 16, "V": 16}, "float32")
    got, (o, S) = run(p, x, exact=False), expected(x)
    assert rms_error(got["o"], o) < 1e-5 and rms_error(got["final_state"], S) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("chunk, blocks", [(16, 0), (32, 1), (64, 0), (128, 3)])
def test_substitution_takes_two_products_a_doubling_of_blocks(chunk, blocks):
    """A tile of 64 rows is one block."""
    s, sizes = Schedule("inverse", (("A",), ("Tinv",), ("o", "S"))), {"C": chunk, "K": 16, "V": 16}
    p = lower(find("gated_delta_rule").trace(), "tilelang", s, sizes, "float16")
    kinds = [o.kind for o in walk(p.kernels[1].body)]
    assert kinds.count("matmul") == 2 * blocks and kinds.count("diag_inverse") == 1
    without_blocks = lower(find("gated_delta_rule").trace(), "triton", s, sizes, "float16")
    assert "diag_inverse" not in {o.kind for o in walk(without_blocks.kernels[1].body)}


@pytest.mark.parametrize("name, grids", [
    ("staged", "chunks chunks chunks chunks sequences chunks"), ("prepared", "chunks chunks sequences chunks"),
    ("replay", "chunks sequences"), ("walk", "chunks sequences"), ("fused", "sequences")])
def test_cut_is_parallel_where_it_can_be(name, grids):
    p = lower(find("gated_delta_rule").trace(), "triton", named(name), SIZES, "float16")
    assert " ".join(k.grid for k in p.kernels) == grids


def test_a_value_nobody_reads_later_is_not_written():
    p = lower(find("gated_delta_rule").trace(), "triton", named("fused"), SIZES, "float16")
    assert not p.role("workspace")
    p = lower(find("gated_delta_rule").trace(), "triton", named("replay"), SIZES, "float16")
    assert {t.name for t in p.role("workspace")} == {"G_ws", "Tinv_ws"}


def test_one_kernel_a_value():
    """Any cut works, not only the named ones."""
    s = Schedule("each", (("G",), ("D",), ("A",), ("Tinv",), ("U", "S"), ("o",)))
    x = problem([40], 1, 1, 16, 32)
    p = lower(find("gated_delta_rule").trace(), "triton", s, SIZES, "float16")
    assert len(p.kernels) == 6 and rms_error(run(p, x)["o"], expected(x)[0]) < 1e-11


@pytest.mark.parametrize("kernels, text", [
    ((("G", "X"), ("o", "S")), "names X"), ((("o",),), "no group of kernels writes S"),
    ((("G",), ("G", "o", "S")), "twice"), (((), ("o", "S")), "empty group"), ((("S",),), "writes o"),
    ((("scale",), ("o", "S")), "names scale"), ((("o", "S"), ("G",)), "group G, which writes no output and no value"),
    ((("S",), ("o",), ("A", "D")), "group A,D, which writes no output")])
def test_bad_cuts(kernels, text):
    with pytest.raises(ScheduleError, match=text):
        cut(find("gated_delta_rule").trace(), Schedule("bad", kernels), SIZES)


@pytest.mark.parametrize("target", OWN)
def test_a_number_a_chunk_is_no_workspace_where_cores_share_no_memory(target):
    plan = Schedule("own", (("chunk_decay",), ("o", "S")))
    build = lambda: lower(find("gated_delta_rule").trace(), target, plan, SIZES, "float16")
    if target == "pto":
        with pytest.raises(ScheduleError, match="names chunk_decay, one number for each chunk; accepted"):
            build()
    else:
        assert [k.name for k in build().kernels] == ["chunk_decay", "o_S"]


@pytest.mark.parametrize("kernels", ["oS", ("oS",), ["oS"], 3, ((1,),), (("o", None),)])
def test_kernels_are_groups_of_names(kernels):
    with pytest.raises(ScheduleError, match=r"schedule own: kernels=.*; accepted are groups of names"):
        Schedule("own", kernels)
    assert hash(Schedule("own", [["o", "S"]])) == hash(Schedule("own", (("o", "S"),)))


@pytest.mark.parametrize("field, value", [
    ("part_chunks", 1.5), ("part_chunks", True), ("v_block", -1), ("v_block", "64"), ("inverse_block", -1), ("inverse_block", 7),
    ("inverse_block", 128), ("descriptors", 7), ("longest_first", 2), ("cache_masks", 5), ("cache_masks", 1),
    ("value_heads", True), ("stages", 2.0), ("form", ["wy"])])
def test_fields_of_a_schedule_are_what_is_accepted(field, value):
    with pytest.raises(ScheduleError, match=re.escape(f"schedule own: {field}={value!r}; accepted are ")):
        Schedule("own", (("o", "S"),), partition="decay", **{field: value})


@pytest.mark.parametrize("name", ["../x y", "", "a/b", "a-b", "\u00e9", "a\n", 3, None])
def test_a_schedules_name_is_part_of_a_files(name):
    with pytest.raises(ScheduleError, match=r"schedule: got the name .*; accepted: letters, digits and _"):
        Schedule(name, (("o", "S"),))


def test_groups_of_ones_own_are_taken_to_the_letter_and_those_of_named_schedules_are_not():
    lowered = lambda page, s: lower(find(page).trace(), "triton", s, SIZES, "float16")
    for page, own, missing in (("gated_delta_rule", (("G", "Tnv"), ("o", "S")), "names Tnv"),
                               ("simple_gla", (("G", "A"), ("o", "S")), "names A")):
        with pytest.raises(ScheduleError, match=missing):
            lowered(page, Schedule("own", own))
    for s in (named("replay"), replace(named("replay"), name="own", v_block=16)):
        assert [k.name for k in lowered("simple_gla", s).kernels] == ["G", "o_S"]


def test_bad_fields():
    with pytest.raises(ScheduleError, match="form='x'; accepted are direct"):
        Schedule("bad", (("o", "S"),), form="x")
    with pytest.raises(ScheduleError, match="accepted: staged"):
        named("nothing")


def test_what_a_state_becomes_is_not_written_before_it():
    """It would be rounded on its way."""
    @algorithm(q="C K", v="C V", S=carried("K V"))
    def linear(q, v, S):
        o = q @ S
        N = S + q.T @ v
        return o, N
    with pytest.raises(ScheduleError, match=r"a group has N \(the next value of the state S\), and a later group has the state; "
                                            r"accepted"):
        lower(linear.trace(), "triton", Schedule("bad", (("N",), ("o", "S"))), SIZES, "float16")


@pytest.mark.parametrize("form", ["wy", "gate-free", "split", "unit"])
def test_a_form_that_does_not_apply_is_an_error(form):
    @algorithm(q="C K", v="C V", S=carried("K V"))
    def linear(q, v, S):
        return q @ S + v, S + q.T @ v
    with pytest.raises(ScheduleError, match=form):
        rewrite(linear.trace(), Schedule("bad", (("S",),), form=form))


def test_a_named_schedule_may_have_a_variant_for_an_architecture():
    """Elsewhere what was loaded is multiplied apart."""
    p = find("gated_delta_rule").trace()
    plans = [named("walk", arch).adapted(p) for arch in ("", "sm_90a")]
    products = [{o.out: o.args for o in walk(rewrite(p, s).kernels[0].body) if o.kind == "matmul"} for s in plans]
    assert products[0]["U_offset"] == ("Tinv_scaled", "v") and "U_offset" not in products[1]
    assert len(products[0]) == len(products[1]) + 1
    assert [s.form for s in plans] == ["split", "unit"] and plans[1].kernels[0] == ("@gate_sum", "@inverse", "@gate")
    assert [Build("tilelang", schedule="walk", arch=arch).plan for arch in ("", "sm_90a")] == plans
    assert varied("walk", "sm_90a", stages=3) == replace(plans[1], stages=3) and changes(plans[1], "sm_90a") == {}
    assert changes(plans[0], "sm_90a") == {"kernels": plans[0].kernels, "form": "split"}
    assert all(x.name == n for (n, _), x in VARIANTS.items())


def test_a_schedule_of_ones_own_is_taken_as_written():
    """On sm_90a too, where groups and form are those of a named schedule that has a variant there."""
    own = replace(named("walk"), name="own")
    p = lower(find("gated_delta_rule").trace(), "tilelang", own, {"C": 64, "K": 64, "V": 64}, "float16", "sm_90a")
    assert [k.name for k in p.kernels] == ["G_Tinv_scaled", "o_S"]
    gla = find("simple_gla").trace()
    assert named("walk").adapted(gla) == replace(named("walk"), form="direct")
    named_values = replace(own, kernels=(("G",), ("o", "S")))
    assert named_values.adapted(gla) == named_values


@pytest.mark.parametrize("groups, waiting", [((("G", "beta"), ("o", "S")), []), ((("G", "Tinv_below", "beta"), ("o", "S")), []),
                                             ((("G",), ("U", "S"), ("o",)), ["v_minus_exp_G_k_S"]),
                                             ((("G", "Tinv"), ("o", "S")), ["v_minus_exp_G_k_S"])])
def test_in_form_unit_beta_multiplies_what_does_not_wait_for_the_state(groups, waiting):
    """Unless a group names what it would have to go through."""
    p = rewrite(find("gated_delta_rule").trace(), Schedule("own", groups, form="unit"))
    ops = [o for o in walk(p.kernels[0].body) if o.out]
    columns, depends, scaled = {o.out for o in ops if o.kind == "col" and o.args == ("beta",)}, {"S"}, []
    for o in ops:
        depends |= {o.out} if depends & set(o.args) else set()
        scaled += [a for a in o.args if a in depends and columns & set(o.args)]
    assert scaled == waiting and ("U" in depends) == bool(waiting)


def test_v_block_cuts_what_has_v_and_nothing_else():
    x = problem([33], 1, 2, 16, 32)
    p = lower(find("gated_delta_rule").trace(), "triton", replace(named("staged"), v_block=16), SIZES, "float16")
    assert {k.name: k.blocked_dim for k in p.kernels} == {"G": "", "A": "", "Tinv": "", "U_weight_U_offset": "", "S_U": "V",
                                                          "o": "V"}
    got, (o, S) = run(p, x), expected(x)
    assert rms_error(got["o"], o) < 1e-11 and rms_error(got["final_state"], S) < 1e-11
    with pytest.raises(ScheduleError, match="does not divide"):
        lower(find("gated_delta_rule").trace(), "triton", replace(named("fused"), v_block=24), SIZES, "float16")


@pytest.mark.parametrize("careless", ["_no_later_reader", "all_readers"])
def test_a_value_overwritten_while_it_is_read_is_found(careless, monkeypatch):
    """place without one of its two rules: the storage pass refuses the program."""
    if careless == "all_readers":
        monkeypatch.setattr(StoredValues, careless, lambda self, name: [])
    else:
        monkeypatch.setattr(shared_buffers, careless, lambda v, lp, name, new: True)
    page = algorithm(q="C K", k="C K", S=carried("K K"))(_reads_the_old_state)
    with pytest.raises(OverwrittenError, match=r"reads \w+, but \w+ holds"):
        lower(page.trace(), "tilelang", Schedule("mine", (("S", "o"),)), SIZES, "float16")
    monkeypatch.undo()
    lower(page.trace(), "tilelang", Schedule("mine", (("S", "o"),)), SIZES, "float16")


def _reads_the_old_state(q, k, S):
    new = exp(S) + k.T @ q
    o = (q @ new) * q + (q @ k.T) @ (k + q @ S)
    return o, new


def test_workspaces_lie_as_the_walk_that_writes_them_holds_them():
    """An operand of a later kernel's product is stored untransposed, and the product transposes it. Ops that wait for no state do
    not change."""
    p = lower(find("gated_delta_rule").trace(), "triton", named("prepared_vk"), SIZES, "float16")
    assert {t.name: t.dims for t in p.tensors if t.role == "workspace" and len(t.dims) > 1} == {
        "A_ws": ("C", "C"), "U_weight_ws": ("C", "K"), "U_offset_ws": ("C", "V"), "S_ws": ("V", "K"), "U_ws": ("V", "C")}
    o = next(k for k in p.kernels if k.name == "o")
    assert not any(x.attr("transposed") for x in walk(o.body))
    x = problem([33], 1, 2, 16, 32)
    got, (want, S) = run(p, x), expected(x)
    assert rms_error(got["o"], want) < 1e-11 and rms_error(got["final_state"], S) < 1e-11
