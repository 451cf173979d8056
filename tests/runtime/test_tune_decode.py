"""`gdn_codegen tune --decode`: candidates, their comparison with float64, and the one table of all targets."""
import json
import math
from dataclasses import replace

import pytest
import torch
from choices import a_call
from devices import passes_for
from reference import expected, passed, rms_error

from gdn_codegen import cli
from gdn_codegen.runtime.build import Build
from gdn_codegen.runtime.call import choose, choose_decode, tables
from gdn_codegen.runtime.call.device import Facts
from gdn_codegen.runtime.call.tables import DECODE, Extent
from gdn_codegen.runtime.targets import runs
from gdn_codegen.schedule import varied
from gdn_codegen.schedule.contract import Contract
from gdn_codegen.tools import bench_gpu, tune, tune_decode, tune_log
from gdn_codegen.tools.shapes import Shape
from gdn_codegen.tools.tune_jobs import Job

NAMES = ("NVIDIA H200", "sm_90 x 132", "sm_90")
ABOUT = Build("triton", 16, dtype="bfloat16")
SHAPES = (Shape("256 x 1, 16/32", (1,) * 256, 16, 32), Shape("1 x 4, 4/8", (4,), 4, 8))
SMALL = dict(chunk=16, head_dim_k=32, head_dim_v=32, dtype="bfloat16")


class Fake:
    """A meter to which TileLang is the faster where sequences are many, with 64 columns."""

    def wrong(self, b):
        return ""

    def workspace(self, b, s):
        return 0

    def time(self, b, s):
        ms = 0.5 if b.target == "triton" else 0.1 if len(s.lens) > 8 else 0.6
        return {"ms": ms * (1 if b.plan.v_block == 64 else 2)}


@pytest.fixture
def table(tmp_path, monkeypatch):
    monkeypatch.setattr(choose, "unfit", lambda b: "")  # that candidates fit has a test of its own
    todo = tune_decode.jobs(ABOUT, tune_decode.CONTRACTS, SHAPES, 132)
    path = tmp_path / "table.json"
    assert tune.tuned(DECODE, todo, NAMES, "sm_90a", 132, Fake(), path, say=lambda line: None) == 0
    return path


def test_the_table_has_the_fastest_of_each_target_beside_the_one_model(table):
    found = tables.from_json(json.loads(table.read_text()), tables.USER)
    assert len(found) == 8 and {r.table for r in found} == {DECODE}
    many = {r.about.target: r for r in found if r.extent.sequences == 256 and r.about.contract == tune_decode.CONTRACTS[0]}
    assert many["tilelang"].ms == 0.1 and many["triton"].ms == 0.5 and many["tilelang"].about.plan.v_block == 64
    assert many["tilelang"].model_ms == many["triton"].model_ms == 1.0  # of Triton, all columns


def test_steps_choose_from_what_tune_wrote(table, monkeypatch):
    monkeypatch.setattr(tables, "own_path", lambda device, name: table if name == DECODE else table.with_name("none"))
    passes_for(monkeypatch, Facts("cuda", NAMES, units=132))
    monkeypatch.setattr(choose_decode, "runs", lambda target, device: True)
    tables.rows.cache_clear()
    for x, target in ((Extent(16, 32, 256, 256), "tilelang"), (Extent(4, 8, 1, 4), "triton")):
        found = choose_decode.choice(a_call(x, getattr(torch, ABOUT.dtype), "cuda", (ABOUT.head_dim_k, ABOUT.head_dim_v),
                                            tune_decode.CONTRACTS[1], decode=True))
        assert found.build.target == target and found.build.plan.v_block == 64 and "the user's table" in str(found)
    assert not tables.rows(NAMES, "triton")[0].table == DECODE  # nor do they serve prefill
    tables.rows.cache_clear()


@pytest.mark.slow
def test_the_models_choice_at_each_shape_is_timed_first_and_nothing_twice():
    todo = tune_decode.jobs(ABOUT, tune_decode.CONTRACTS[:1], SHAPES, 132)
    assert [(j.build.target, j.build.plan.v_block, j.shape.name) for j in todo[:2]] == [
        ("triton", 16, "256 x 1, 16/32"), ("triton", 8, "1 x 4, 4/8")]
    assert len({j.key for j in todo}) == len(todo) == len(set(todo)) and {j.build.target for j in todo} == {"triton", "tilelang"}


@pytest.mark.slow
def test_a_candidate_of_each_chunk_and_order_fits():
    todo = {j.build for j in tune_decode.jobs(ABOUT, tune_decode.CONTRACTS[:1], SHAPES, 132)}
    kinds = {(b.target, b.chunk, b.plan.state_layout): b for b in sorted(todo, key=lambda b: b.name)}
    assert len(kinds) == 12 and not [choose.unfit(b) for b in kinds.values() if not choose.fits(b)]


def test_jobs_survive_the_log():
    j = Job(Build("tilelang", 32, schedule=varied("fused", v_block=32, state_layout="vk"),
                  contract=tune_decode.CONTRACTS[0]), 4, 16, (4, 4), DECODE)
    assert tune_log.job_of(j.key, DECODE) == j and replace(j, build=replace(j.build, target="triton")).key != j.key


# --- the meter, on CPU tensors ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("accept", [str(tune_decode.CONTRACTS[0]), "state=vk/in_place", ""])
def test_the_float64_recurrence_is_that_of_the_tests(accept):
    b = Build("triton", contract=Contract.parse(accept), **SMALL)
    x = tune_decode.step(b, Shape("3 x 5, 2/4", (5,) * 3, 2, 4), "cpu")
    forms = dict(b.contract.inputs)
    _, page = passed([5] * 3, 2, 4, 32, 32, forms)  # for its keys
    given = {n: t.double() for n, t in x.given.items()}
    if forms:
        for n in "qk":
            given[n] = given[n] / torch.sqrt((given[n] ** 2).sum(-1, keepdim=True) + 1e-6)
        given["g"] = -torch.exp(given["A_log"]) * torch.logaddexp(given["g"] + given["dt_bias"], torch.zeros(()).double())
        given["beta"] = 1 / (1 + torch.exp(-given["beta"]))
    pool = x.pool if x.slots is None else x.pool[x.slots.long()]
    page |= {n: given[n].flatten(0, 1) for n in ("q", "k", "v", "g", "beta")}
    page["S"] = pool.mT if b.contract.state_layout == "vk" else pool
    o, S = expected(page)
    got_o, got = tune_decode.expected(b, x, (1, 3))
    assert rms_error(got_o.flatten(0, 1), o[:, [1, 3]]) < 1e-12 and rms_error(got, S[:, [1, 3]]) < 1e-12


@pytest.mark.slow
@pytest.mark.parametrize("target", [t for t in ("triton", "tilelang") if runs(t, "cpu")])
def test_a_candidate_is_held_against_float64(target, monkeypatch):
    b = Build(target, contract=tune_decode.CONTRACTS[0], schedule=varied("fused", v_block=16, state_layout="vk"), **SMALL)
    monkeypatch.setattr(tune_decode, "CHECKED", Shape("2 x 3, 1/2", (3,) * 2, 1, 2))
    meter = tune_decode.Steps(1, "cpu")
    assert meter.wrong(b) == ""
    call = tune_decode.call
    for o, state in ((1.1, 1), (1, 1.1), (math.nan, 1), (1, math.nan)):
        def changed(*a, by=(o, state)):
            return tuple(t * n for t, n in zip(call(*a), by, strict=True))
        monkeypatch.setattr(tune_decode, "call", changed)
        assert meter.wrong(b).startswith("off by")
    monkeypatch.setattr(tune_decode, "call", lambda *a: 1 / 0)
    monkeypatch.setattr(tune_decode.Steps, "alive", lambda self: None)
    assert meter.wrong(b) == "ZeroDivisionError: division by zero"
    assert meter.time(b, tune_decode.CHECKED) == {"dropped": "ZeroDivisionError: division by zero"}
    monkeypatch.setattr(tune_decode, "call", call)
    monkeypatch.setattr(bench_gpu, "wall_time", lambda run, n: 0.25 if run() else 0)
    assert meter.time(b, tune_decode.CHECKED) == {"ms": 0.25}


@pytest.mark.slow
@pytest.mark.parametrize("target", [t for t in ("triton", "tilelang") if runs(t, "cpu")])
def test_a_candidate_that_is_off_on_keys_that_are_alike_is_dropped(target, monkeypatch):
    """Its step is right on other keys."""
    b = Build(target, contract=tune_decode.CONTRACTS[0], schedule=varied("fused", v_block=16, state_layout="vk"), **SMALL)
    monkeypatch.setattr(tune_decode, "CHECKED", Shape("2 x 3, 1/2", (3,) * 2, 1, 2))
    monkeypatch.setattr(tune_decode, "ALIKE", Shape("1 x 16, 1/2", (16,), 1, 2))
    call = tune_decode.call

    def worse(b, x, pool):
        k = x.given["k"].float()
        near = (k - k[:, :1]).norm() < 0.5 * k.norm()
        return tuple(t * (1.1 if near else 1) for t in call(b, x, pool))
    monkeypatch.setattr(tune_decode, "call", worse)
    assert tune_decode.Steps(1, "cpu").wrong(b).startswith("off by")
    assert tune_decode.Steps(1, "cpu").wrong(b).endswith("on similar keys")


# --- the command -----------------------------------------------------------------------------------------------------
def test_what_means_nothing_with_decode_is_refused(tmp_path, capsys):
    shapes = tmp_path / "shapes.json"
    shapes.write_text(json.dumps([{"name": "long", "lens": [17], "H": 1, "HV": 1}]))
    for words, said in ((["--unit-keys"], "unit_keys: got True with --decode"),
                        (["--memory", "1"], "memory: got 1.0 with --decode"),
                        (["--target", "triton"], "target: got 'triton' with --decode"),
                        (["--layout", "bhtd"], "layout: got 'bhtd' with --decode"),
                        (["--shapes", str(shapes)], "shapes: got long of [17] tokens; accepted with --decode")):
        assert cli.main(["tune", "--decode", *words]) == 2 and said in capsys.readouterr().err


def test_candidates_may_be_compiled_ahead(monkeypatch, capsys):
    asked = []

    def compiled(todo, arch, heads):
        asked.append((len(todo), arch, heads))
        return ["one"]
    monkeypatch.setattr(tune_decode, "compiled_ahead", compiled)
    assert cli.main(["tune", "--decode", "--compile", "sm_90a", "--only", "8 x 1, 16/32"]) == 0
    assert capsys.readouterr().out == "one\n" and asked[0][0] > 50 and asked[0][1:] == ("sm_90a", [(4, 8), (16, 32)])
