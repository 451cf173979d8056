"""`gdn_codegen tune` with a timer that is a function of the build: what is measured, kept, dropped, and chosen."""
import json
import math
import re
from dataclasses import dataclass, field, replace
from types import SimpleNamespace

import pytest
import torch
from choices import choice_for
from devices import change, passes_for

from gdn_codegen import cli
from gdn_codegen.runtime.build import Build
from gdn_codegen.runtime.call import choose, tables
from gdn_codegen.runtime.call.device import Facts
from gdn_codegen.runtime.load import function
from gdn_codegen.schedule import varied
from gdn_codegen.targets import find
from gdn_codegen.targets.candidates import Space
from gdn_codegen.tools import bench_calls, bench_gpu, candidates, compile_ahead, tune, tune_jobs, tune_log, tune_meter
from gdn_codegen.tools.problems import problem, reference
from gdn_codegen.tools.shapes import Shape
from gdn_codegen.tools.tune import Tuner
from gdn_codegen.tools.tune_jobs import Job
from gdn_codegen.tools.tune_log import Log

ABOUT = Build("tilelang")
SHAPES = (Shape("long", (11264,), 16, 16), Shape("many", (4096,) * 16, 4, 16))
NAMES = ("NVIDIA H200", "sm_90 x 132", "sm_90")
GPU = (NAMES, "sm_90a", 132)
PARTS = {"partition": (None, "decay"), "part_chunks": (0, 32), "stages": (2, 3)}
BLOCKS = ("fused", "replay"), {"v_block": (0, 64)}, (64, 32)
SPACES = (Space(("walk",), PARTS, (64,), "sm_90a"), Space(*BLOCKS, "sm_90a"), Space(*BLOCKS))


def speed(b, s):
    """The best: parts of 32 chunks where sequences are few, three stages elsewhere, others than `walk` last."""
    few = len(s.lens) * s.HV <= 66
    ms = 1.0 if b.plan.name == "walk" else 2.0
    ms *= 0.5 if few and b.plan.partition else 1.0
    ms *= 0.9 if few and b.plan.part_chunks == 32 else 1.0
    ms *= 0.8 if b.plan.name == "walk" and b.plan.stages == 3 and not few else 1.0
    return ms * (1.1 if b.plan.name == "replay" else 1.0) * (1.2 if b.chunk == 32 else 1.0)


class Killed(BaseException):
    pass


@dataclass
class Fake:
    """A meter. kill: the measurement at which the process ends; bad: names of builds with wrong results."""

    kill: int = -1
    bad: tuple = ()
    bytes: int = 0
    seen: list = field(default_factory=list)
    checked: list = field(default_factory=list)

    def wrong(self, b):
        self.checked.append(b.name)
        return "off by 0.5" if b.name in self.bad else ""

    def workspace(self, b, s):
        return self.bytes if b.plan.name == "replay" else 0

    def time(self, b, s):
        if len(self.seen) == self.kill:
            raise Killed
        self.seen.append((b.name, s.name))
        return {"ms": speed(b, s)}


class Clock:
    """A second for every look at it."""

    now = 0.0

    def __call__(self):
        self.now += 1
        return self.now


@pytest.fixture(autouse=True)
def small(monkeypatch):
    change(monkeypatch, "tilelang", spaces=SPACES)
    monkeypatch.setattr(tables, "versions", lambda target: {"gdn_codegen": "0", target: "1"})
    monkeypatch.setattr(choose, "unfit", lambda b: "")  # which lowers, and the passes' tests check that


@pytest.fixture
def run(tmp_path):
    said = []

    def run(meter, **options):
        said.clear()
        code = tune.tune(ABOUT, SHAPES, *GPU, meter, tmp_path / "table.json", say=said.append, **options)
        return code, said
    run.path = tmp_path / "table.json"
    run.log = tmp_path / "table.jsonl"
    run.table = lambda: json.loads(run.path.read_text())
    run.rows = lambda: tables.from_json(run.table(), tables.USER)
    return run


def test_the_table_has_the_fastest_of_each_shape_and_chunk(run):
    meter = Fake()
    assert run(meter)[0] == 0
    best = {(r.extent.sequences, r.about.chunk): r for r in run.rows()}
    assert best[1, 64].about.name == "gdn_c64_bthd_decay32_sm90a" and best[1, 64].ms == 0.45 and best[1, 64].model_ms == 0.5
    assert best[16, 64].about.name == "gdn_c64_bthd_walk_stages3_sm90a" and best[16, 64].ms == 0.8
    assert best[1, 32].about.name == "gdn_c32_bthd_fused_sm90a" and len(best) == 4
    assert len(meter.seen) == len(set(meter.seen)) == len(tune_jobs.jobs(ABOUT, SHAPES, *GPU[1:]))


def test_portable_candidates_are_for_inputs_that_nothing_made_for_the_gpu_fits(monkeypatch):
    assert {b.arch for b in candidates.candidates(ABOUT, "sm_90a")} == {"sm_90a"}
    assert {b.arch for b in candidates.candidates(ABOUT, "")} == {""}
    monkeypatch.setattr(choose, "unfit", lambda b: b.arch)
    assert {b.arch for b in candidates.candidates(ABOUT, "sm_90a")} == {"sm_90a", ""}


@pytest.mark.parametrize("arch, chunk, whole, parts", [("", 32, False, False), ("sm_90a", 32, True, True),
                                                       ("sm_90a", 64, False, True)])
def test_candidates_of_a_space_share_its_base_and_what_the_architecture_wants(arch, chunk, whole, parts, monkeypatch):
    implied = find("triton").spaces[0].implied
    change(monkeypatch, "triton", spaces=(Space(("walk",), PARTS, (chunk,), base={"stages": 4}, implied=implied),))
    plans = [b.plan for b in candidates.candidates(Build("triton"), arch)]
    assert varied("walk", stages=4, descriptors=whole) in plans
    assert varied("walk", stages=4, partition="decay", part_chunks=32, descriptors=parts) in plans
    assert {p.descriptors for p in plans} == {whole, parts}


@pytest.mark.parametrize("names, mine", [(NAMES, True), (("NVIDIA H100", *NAMES[1:]), True),  # of its kind
                                         (("NVIDIA H20", "sm_90 x 78", "sm_90"), False)])
def test_calls_choose_from_what_tune_wrote(names, mine, run, monkeypatch):
    run(Fake())
    passes_for(monkeypatch, Facts("cuda", names, *GPU[1:]))
    monkeypatch.setattr(tables, "own_path", lambda device, target: run.path)
    tables.rows.cache_clear()
    q = torch.empty(1, 11264, 16, 128, dtype=torch.float16, device="meta")
    for chunk, name in ((None, "gdn_c64_bthd_decay32_sm90a"), (32, "gdn_c32_bthd_fused_sm90a")):
        assert (choice_for(q, q, "tilelang", chunk).build.name == name) == mine
    tables.rows.cache_clear()


@pytest.mark.parametrize("kill", [0, 1, 7])
def test_a_killed_run_goes_on_where_it_was_and_writes_the_same_table(kill, run, tmp_path):
    first = Fake(kill)
    with pytest.raises(Killed):
        run(first)
    assert len(first.seen) == kill and len(run.rows()) <= kill
    second = Fake()
    run(second)
    assert not set(first.seen) & set(second.seen)
    again = Fake()
    tune.tune(ABOUT, SHAPES, *GPU, again, tmp_path / "other.json", say=lambda line: None)
    assert (tmp_path / "other.json").read_text() == run.path.read_text()
    assert sorted(again.seen) == sorted(first.seen + second.seen)
    done = Fake()
    assert run(done)[0] == 0 and done.seen == []


def test_a_table_whose_log_would_be_itself_is_refused(run, tmp_path):
    with pytest.raises(ValueError, match=r"out: got .*table\.jsonl; accepted: a name that ends in \.json"):
        tune.tune(ABOUT, SHAPES, *GPU, Fake(), tmp_path / "table.jsonl")
    assert not run.log.exists()


def test_a_line_cut_short_is_measured_again_and_said(run):
    run(Fake())
    whole, table = run.log.read_bytes(), run.path.read_text()
    run.log.write_bytes(whole[:-9])
    meter = Fake()
    _, said = run(meter)
    assert len(meter.seen) == 1 and f"line {len(whole.splitlines())} is not whole" in said[0]
    assert len(run.log.read_bytes().splitlines()) == len(whole.splitlines()) + 2  # nothing was written onto it
    assert run.path.read_text() == table


def test_measurements_are_on_disk_when_the_next_begins(run, monkeypatch):
    synced = []
    monkeypatch.setattr(tune_log.os, "fsync", lambda fd: synced.append(run.log.read_bytes().splitlines()[-1]))
    meter = Fake(kill=3)
    with pytest.raises(Killed):
        run(meter)
    records = [json.loads(x) for x in synced if x.startswith(b"{")]
    kept = [json.loads(x) for x in run.log.read_text().splitlines()]
    assert [r["key"] for r in records if "ms" in r] == [r["key"] for r in kept if "ms" in r]
    assert sum("ms" in r for r in kept) == 3 and "begun" in records[-1]


def test_a_budget_leaves_the_rest_pending(run):
    meter = Fake()
    _, said = run(meter, budget=5, clock=Clock())
    assert 1 <= len(meter.seen) <= 3 and "pending: the same command goes on" in said[-2]
    # first of all the model's choice at each shape
    assert meter.seen[:2] == [("gdn_c64_bthd_decay_sm90a", "1 x 11264, 16/16"),
                              ("gdn_c64_bthd_fused_walk_decay_sm90a", "16 x 4096, 4/16")]
    listed = tune.listing(ABOUT, SHAPES, *GPU, run.path)
    assert sum(x.endswith("pending") for x in listed) == len(listed) - len(meter.seen)
    run(Fake())
    assert not any(x.endswith("pending") for x in tune.listing(ABOUT, SHAPES, *GPU, run.path))


def test_progress_says_how_far_what_was_found_and_what_is_left(run):
    _, said = run(Fake(), budget=10_000, clock=Clock())
    assert "measurements, 0 of them in" in said[0]
    assert said[1].startswith("[1/") and "0.5000 ms (best 0.5000, gdn_c64_bthd_decay_sm90a)" in said[1]
    assert "s left, " in said[1] and "s of the budget" in said[1]


def test_wrong_candidates_are_dropped_with_their_reason_everywhere(run):
    """Kernels are checked once, in parts of which a short sequence has several."""
    meter = Fake(bad=("gdn_c64_bthd_decay1_sm90a", "gdn_c64_bthd_walk_stages3_decay1_sm90a"))
    _, said = run(meter)
    for name, shapes in (("gdn_c64_bthd_decay_sm90a", 2), ("gdn_c64_bthd_decay32_sm90a", 2)):
        assert sum(f"{name}: dropped: off by 0.5" in x for x in said) == shapes
    assert len(meter.checked) == len(set(meter.checked)) and all(r.about.plan.partition is None for r in run.rows())


def test_candidates_that_hold_too_much_or_do_not_fit_are_dropped(run, monkeypatch):
    monkeypatch.setattr(choose, "unfit", lambda b: "has no room" if b.plan.v_block else "")
    meter = Fake(bytes=3 * 2**30)
    _, said = run(meter, memory=2**30)
    assert any("replay_sm90a: dropped: holds 3.0 GiB between its kernels, 1.0 are allowed" in x for x in said)
    assert any("vblock64_sm90a: dropped: has no room" in x for x in said)
    assert not any("replay" in name or "vblock" in name for name, _ in meter.seen)


def test_what_stops_the_process_twice_is_dropped(run):
    for _ in range(2):
        with pytest.raises(Killed):
            run(Fake(kill=0))
    meter = Fake()
    _, said = run(meter)
    assert "gdn_c64_bthd_decay_sm90a: dropped: stopped the process twice" in said[1]
    assert ("gdn_c64_bthd_decay_sm90a", "1 x 11264, 16/16") not in meter.seen


def test_a_lost_device_ends_the_run_and_keeps_what_there_is(run, monkeypatch):
    meter = Fake()

    def lost(b, s, time=meter.time):
        if len(meter.seen) == 2:
            raise tune_meter.DeviceLost("illegal access")
        return time(b, s)
    monkeypatch.setattr(meter, "time", lost)
    code, said = run(meter)
    assert code == 1 and "illegal access" in said[-2] and len(run.rows()) == 2


def test_the_model_is_preferred_within_the_noise(run, monkeypatch):
    monkeypatch.setattr(tune_log, "MARGIN", 0.85)
    run(Fake())
    best = {(r.extent.sequences, r.about.chunk): r.about.name for r in run.rows()}
    assert best[1, 64] == "gdn_c64_bthd_decay_sm90a" and best[16, 64] == "gdn_c64_bthd_walk_stages3_sm90a"


def test_a_log_of_another_device_or_version_is_refused(run, monkeypatch):
    run(Fake())
    with pytest.raises(ValueError, match=r"log: got .*NVIDIA H200"):
        tune.tune(ABOUT, SHAPES, "NVIDIA H100", "sm_90a", 132, Fake(), run.path)
    monkeypatch.setattr(tables, "versions", lambda target: {"gdn_codegen": "0", target: "2"})
    with pytest.raises(ValueError, match="log: got"):
        run(Fake())


def test_one_log_may_grow_by_shapes_and_dtypes(run):
    run(Fake())
    before = run.rows()
    tune.tune(replace(ABOUT, dtype="bfloat16"), SHAPES[:1], *GPU, Fake(), run.path, say=lambda line: None)
    after = run.rows()
    assert set(before) < set(after) and {r.about.dtype for r in after} == {"float16", "bfloat16"}


def test_jobs_survive_the_log():
    j = Job(Build("tilelang", 32, schedule=varied("fused", v_block=32), dtype="bfloat16"), 4, 16, (4096, 28672))
    assert tune_log.job_of(j.key, "tilelang") == j and j.shape.name == "4096 + 28672, 4/16"


def test_parts_as_long_as_a_sequence_are_no_candidates():
    found = tune_jobs.jobs(ABOUT, [Shape("short", (2048, 64), 1, 2)], *GPU[1:])
    assert {j.build.plan.part_chunks for j in found} == {0} and any(j.build.plan.partition for j in found)


@pytest.mark.parametrize("target", ["tilelang", "triton"])
def test_the_spaces_that_come_with_the_package(target, monkeypatch):
    monkeypatch.undo()
    found = candidates.candidates(Build(target), "sm_90a")
    assert len({b.name for b in found}) == len(found) <= 120 and all(choose.fits(b) for b in found[:3])
    assert all(not b.arch for b in candidates.candidates(Build(target), ""))


# --- the GPU's meter, on CPU tensors ----------------------------------------------------------------------------------
@pytest.fixture
def cpu(monkeypatch):
    """CPU tensors in place of a GPU's."""
    tune_meter._alike.cache_clear()
    problem = tune_meter.problem
    monkeypatch.setattr(tune_meter, "problem", lambda *a, **k: problem(*a, **{**k, "device": "cpu"}))
    monkeypatch.setattr(tune_meter.Gpu, "alive", lambda self: None)
    return tune_meter.Gpu()


SMALL = dict(chunk=16, head_dim_k=16, head_dim_v=16)


@pytest.mark.slow
def test_a_candidate_is_checked_against_float64_in_parts_and_tails(cpu, monkeypatch):
    b = tune_jobs.in_short_parts(Build("triton", schedule=varied("replay", partition="decay", part_chunks=64), **SMALL))
    ours, results = bench_calls.ours, []
    monkeypatch.setattr(bench_calls, "ours", lambda b, x: lambda: results.append(ours(b, x)()) or results[-1])
    assert cpu.wrong(b) == ""
    o, S = results[0]  # of the first of its problems
    host = function(b).__globals__["HOST"]
    with monkeypatch.context() as m:  # what is summed up shows
        m.setattr(host, "tables", replace(host.tables, kernels=tuple(x for x in host.tables.kernels if x[0] != "S_start")))
        host.plans.clear()
        assert cpu.wrong(b) != ""
    host.plans.clear()
    monkeypatch.setattr(bench_calls, "ours", lambda b, x: lambda: (o * 1.1, S * 1.1))
    assert cpu.wrong(b).startswith("off by 1")
    monkeypatch.setattr(bench_calls, "ours", lambda b, x: lambda: (math.nan * o, S))
    assert "off by nan" in cpu.wrong(b)
    monkeypatch.setattr(bench_calls, "ours", lambda b, x: 1 / 0)
    assert cpu.wrong(b) == "ZeroDivisionError: division by zero"


def powers(x, rounded):
    """o and states by the inverse of powers, (1 - A)(1 + A^2)(1 + A^4)..., each rounded: right but for keys that are alike."""
    o, states, start = torch.empty_like(x.inputs["v"], dtype=torch.float32), [], 0
    q, k = (t[0].float().repeat_interleave(4, 1).transpose(0, 1) for t in (x.inputs["q"], x.inputs["k"]))
    v, g, beta = (t[0].float().transpose(0, 1) for t in (x.inputs["v"], x.inputs["g"], x.inputs["beta"]))
    for length in x.lengths:
        S = torch.zeros(8, q.shape[2], v.shape[2])
        for t in range(start, start + length, 16):
            rows = slice(t, min(t + 16, start + length))
            kc, qc, G, b = k[:, rows], q[:, rows] * x.numbers["scale"], g[:, rows].cumsum(1)[:, :, None], beta[:, rows, None]
            D = (G - G.mT).clamp(max=0).exp().tril()
            A = rounded((b * (kc @ kc.mT) * D).tril(-1))
            eye = torch.eye(A.shape[1])
            inverse, power = eye - A, A
            for _ in range(3):
                power = rounded(power @ power)
                inverse = rounded(inverse @ (eye + power))
            U = inverse @ rounded(b * (v[:, rows] - G.exp() * (kc @ rounded(S))))
            o[0, rows] = (G.exp() * (qc @ rounded(S)) + rounded((qc @ kc.mT) * D) @ rounded(U)).transpose(0, 1)
            S = G[:, -1:].exp() * S + kc.mT @ rounded((G[:, -1:] - G).exp() * U)
        states.append(S)
        start += length
    return o, torch.stack(states)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_candidate_that_is_off_on_keys_that_are_alike_is_dropped(dtype, cpu, run, monkeypatch):
    """The inverse of powers is right on others, as `blocked16` was."""
    b = Build("triton", schedule="replay", dtype=dtype, **SMALL)
    seen = []

    def by_powers(b, x):
        seen.append(x)
        return lambda: powers(x, lambda t: t.to(getattr(torch, dtype)).float())
    monkeypatch.setattr(bench_calls, "ours", by_powers)
    why = cpu.wrong(b)
    assert re.fullmatch(r"off by \S+ \(o\) on similar keys, beta \d\.\d; \S+ is accepted", why)
    x = seen[1]  # ordinary ones, seen[0], passed
    k = x.inputs["k"]
    first = k[:, [0, 179, 188]]
    assert (k[:, :179, 0] == first[:, :1, 0]).all() and (k[:, 179:188, 0] == first[:, 1:2, 0]).all()
    assert 0 < (k[:, 188:, 1] - first[:, 2:, 1]).norm(dim=-1).max() < 0.05 and not x.inputs["g"].any()
    assert sorted({*x.inputs["beta"].flatten().tolist()}) == pytest.approx([0.6, 1.1, 1.6, 1.9])
    limits = tune_meter._alike("triton", 16, dtype, 16, 16)[2]
    for n, of in enumerate(("o", "state")):  # each is looked at, and so is NaN
        for off in (0.9 * limits[of, 0.6], 1.1 * limits[of, 1.9], math.nan):
            def nearly(b, x, n=n, off=off):
                want = reference(x, range(8))
                got = [want.outputs[0][None], want.states[0]]
                got[n] = got[n] * (1 + (0.0 if x.inputs["g"].any() else off))
                return lambda: got
            monkeypatch.setattr(bench_calls, "ours", nearly)
            assert (f"({of}) on similar keys" in cpu.wrong(b)) == (off != 0.9 * limits[of, 0.6])
    monkeypatch.setattr(bench_calls, "ours", by_powers)  # the log has why, and the table has no row of it
    monkeypatch.setattr(Fake, "wrong", lambda self, made: cpu.wrong(b))
    code, said = run(Fake())
    assert code == 1 and not run.rows() and all(f"dropped: {why}" in line for line in said[1:-1])


def test_what_is_accepted_on_keys_that_are_alike_is_of_a_build_that_fits(cpu, monkeypatch):
    """`fused` where it has room; a floor, which admission has, where roundings cost next to nothing."""
    _, _, whole = tune_meter._alike("triton", 16, "float32", 16, 16)
    assert set(whole.values()) == {1e-4}
    tune_meter._alike.cache_clear()
    tried = []
    monkeypatch.setattr(choose, "unfit", lambda b: "" if tried.append(b.plan.name) or b.plan.name == "replay" else "no room")
    tune_meter._alike("triton", 16, "bfloat16", 16, 16)
    assert tried == ["fused", "replay"]


@pytest.mark.slow
def test_times_are_those_that_bench_takes(cpu, monkeypatch):
    b, s = Build("triton", schedule="replay", **SMALL), Shape("s", (40,), 1, 2)
    assert cpu.workspace(b, s) > 0
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(bench_gpu, "device_time", lambda run, n: (0.25, {}))
    monkeypatch.setattr(bench_gpu, "wall_time", lambda run, n: 0.5)
    monkeypatch.setattr(bench_gpu, "host_time", lambda run, n: 9.0)
    assert cpu.time(b, s) == {"ms": 0.25, "wall_ms": 0.5}
    monkeypatch.setattr(bench_gpu, "device_time", lambda run, n: 1 / 0)
    assert cpu.time(b, s) == {"dropped": "ZeroDivisionError: division by zero"}
    tune_meter._inputs.cache_clear()


# --- the command ------------------------------------------------------------------------------------------------------
def test_the_command(run, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(tune, "here", lambda: GPU)
    monkeypatch.setattr(tune_meter, "Gpu", lambda runs: Fake())
    shapes = tmp_path / "shapes.json"
    shapes.write_text(json.dumps([{"name": "a", "lens": [64], "H": 1, "HV": 2}, {"name": "b", "lens": [65], "H": 1, "HV": 2}]))
    words = ["tune", "--target", "tilelang", "--shapes", str(shapes), "--only", "b", "--out", str(run.path)]
    assert cli.main([*words, "--list"]) == 0 and not run.path.exists() and "pending" in capsys.readouterr().out
    assert cli.main(words) == 0 and all(r.extent.tokens == 65 for r in run.rows())
    assert cli.main([*words[:1], "--out", "x"]) == 2 and "out: got one file for several targets" in capsys.readouterr().err


def test_candidates_are_compiled_where_there_is_no_gpu(monkeypatch, capsys):
    """A kernel once, however long the parts; on Triton for the head counts of the shapes and of the check."""
    compiled, asked = [], []
    module = SimpleNamespace(_launcher=SimpleNamespace(kernels=("a", "b"), compiled=lambda *x: compiled.append(x)))
    monkeypatch.setattr(tune, "cached", lambda b: b)
    monkeypatch.setattr(compile_ahead, "import_path", lambda b: module)
    monkeypatch.setattr(compile_ahead, "triton", lambda path, arch, heads: asked.append((arch, heads)) or ())
    assert cli.main(["tune", "--target", "tilelang", "--compile", "sm_90a"]) == 0
    lines = capsys.readouterr().out.splitlines()
    names = [line.split()[1] for line in lines]
    assert len(names) == len(set(names)) and {"gdn_c64_bthd_decay1_sm90a:", "gdn_c64_bthd_fused_sm90a:"} <= set(names)
    assert compiled == [("a", "sm_90a"), ("b", "sm_90a")] * len(lines)
    change(monkeypatch, "triton", spaces=SPACES[2:])
    assert cli.main(["tune", "--target", "triton", "--compile", "gfx942", "--only", "1 x 2048, 16/32"]) == 0
    assert set(map(str, asked)) == {"('gfx942', [(2, 8), (16, 32)])"}


def test_without_a_gpu_it_says_so(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert cli.main(["tune"]) == 2 and "a machine where torch sees no GPU" in capsys.readouterr().err


def test_a_log_whose_first_line_was_cut_short_says_again_what_it_is_of(tmp_path):
    head = {"device": "x", "target": "tilelang", "versions": {}}
    (tmp_path / "a.jsonl").write_bytes(json.dumps(head).encode()[:20])
    log = Log(tmp_path / "a.jsonl", head).load()
    log.append({"key": "k", "ms": 1.0})
    assert log.lost == [1] and Log(log.path, head).load().results == {"k": {"key": "k", "ms": 1.0}}
    with pytest.raises(ValueError, match=r"log: got .* accepted: a log of .*'y'"):
        Log(log.path, {**head, "device": "y"}).load()


def test_a_log_may_be_read_while_it_is_written(tmp_path):
    head = {"device": "x", "target": "tilelang", "versions": {}}
    log = Log(tmp_path / "a.jsonl", head).load()
    log.append({"key": "k", "ms": 1.0})
    assert Log(log.path, head).load().results == {"k": {"key": "k", "ms": 1.0}}
    assert Tuner(log, Fake(), "", 0).left(3, 0) == "about 3 s left"


def test_a_lost_device_is_no_finding(monkeypatch):
    def lost(self):
        raise tune_meter.DeviceLost("gone")
    monkeypatch.setattr(tune_meter, "problem", lambda *a, **k: problem(*a, **{**k, "device": "cpu"}))
    monkeypatch.setattr(tune_meter.Gpu, "alive", lost)
    monkeypatch.setattr(bench_calls, "ours", lambda b, x: 1 / 0)
    b = Build("triton", 16, schedule="replay", head_dim_k=16, head_dim_v=16)
    with pytest.raises(tune_meter.DeviceLost):
        tune_meter.Gpu().wrong(b)
    with pytest.raises(tune_meter.DeviceLost):
        tune_meter.Gpu().time(b, Shape("s", (40,), 1, 2))


@pytest.mark.parametrize("lens, heads, ok", [((2048, 64), 64, False), ((4096,), 64, True), ((4096,), 396, True),
                                             ((4096,), 400, False), ((4096,), 32, False)])
def test_parts_are_shorter_than_a_sequence_and_fill_the_gpu(lens, heads, ok):
    b = Build("tilelang", schedule=varied("walk", partition="decay", part_chunks=32))
    assert tune_jobs.sensible(b, Shape("s", lens, 1, heads), 132) == ok
