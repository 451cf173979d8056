"""`bench --errors`: all value heads of several seeds, ours and peers', on a GPU or interpreted."""
import json
import math
import re

import pytest
import torch
from reference import rms_error

from gdn_codegen.algorithms import find
from gdn_codegen.cli import main
from gdn_codegen.ir import interpret
from gdn_codegen.runtime.build import Build, lowered
from gdn_codegen.schedule import varied
from gdn_codegen.tools import bench_calls, bench_errors, bench_gpu
from gdn_codegen.tools.peer_ops import peers_of
from gdn_codegen.tools.problems import problem, reference, worst
from gdn_codegen.tools.shapes import Shape

SMALL = ["--head-dim-k", "32", "--head-dim-v", "16", "--chunk", "16", "--tokens", "50", "--heads", "1/2"]


@pytest.fixture
def gpu(monkeypatch, no_peers):
    """The CPU in a GPU's place."""
    monkeypatch.setattr(bench_errors, "problem", lambda *a: problem(*a[:6], "cpu", *a[7:]))
    monkeypatch.setattr(bench_errors, "compile_first", lambda *a: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")


def rows(path):
    return json.loads(path.read_text())["rows"]


@pytest.mark.parametrize("target, more, plan", [
    ("triton", ["--schedule", "replay", "--set", "form=unit"], varied("replay", form="unit")),
    ("pto", ["--schedule", "fused"], varied("fused"))])
def test_interpreted(target, more, plan, tmp_path, capsys):
    """Each head of each seed counts once; roundings are the lowered program's."""
    words = ["bench", "--target", target, *more, *SMALL, "--dtype", "bfloat16", "--errors", "2", "--interpret", "--seed", "3",
             "--json", str(tmp_path / "e.json")]
    assert main(words) == 0
    (row,) = rows(tmp_path / "e.json")
    b = Build(target, 16, schedule=plan, dtype="bfloat16", head_dim_k=32, head_dim_v=16)
    each = []
    for seed in (3, 4):
        x = problem(Shape("one", (50,), 1, 2), "bfloat16", 32, 16, seed=seed, device="cpu")
        given = {n: t[0] for n, t in x.inputs.items()}
        p, want = lowered(b), reference(x, (0, 1))
        got = interpret.interpret(p, interpret.Problem([50], 1, 2), {t.name: given.get(t.name) for t in p.role("input")},
                                  x.numbers, exact=False)
        each += [(rms_error(got["o"][:, h], want.outputs[0][:, h]),
                  rms_error(got["final_state"][:, h], want.states[0][:, h])) for h in (0, 1)]
    assert row["heads"] == 4 and row["note"] == b.name and 1e-3 < row["error_o"]["mean"] < row["error_o"]["max"] < 1e-2
    for name, values in zip(("error_o", "error_state"), zip(*each, strict=True), strict=True):
        assert row[name] == {"mean": pytest.approx(sum(values) / 4), "max": max(values)}
    out = capsys.readouterr().out
    assert f"{row['error_o']['mean']:.3e}" in out and f"{row['error_state']['max']:.3e}" in out
    facts = json.loads((tmp_path / "e.json").read_text())["facts"]
    assert facts["options"]["seeds"] == 2 and facts["options"]["interpreted"] and "--interpret" in facts["command"]


def test_parts_that_are_interpreted_are_those_of_the_schedule(monkeypatch):
    spans = []
    real = interpret.interpret
    monkeypatch.setattr(interpret, "interpret", lambda p, x, *a: (spans.append(x.span), real(p, x, *a))[1])
    x = problem(Shape("one", (70,), 1, 1), "float16", 32, 16, device="cpu")
    for chunks in (0, 2):
        plan = varied("walk", partition="decay", part_chunks=chunks)
        bench_errors.interpreted(Build("triton", 16, schedule=plan, head_dim_k=32, head_dim_v=16), x)()
    assert spans == [0, 2]


def test_on_a_gpu_beside_peers(gpu, tmp_path, capsys):
    words = ["bench", "--target", "triton", "--schedule", "fused", *SMALL, "--errors", "1", "--json", str(tmp_path / "e.json")]
    assert main(words) == 0
    found = rows(tmp_path / "e.json")
    assert [r["who"] for r in found] == [*peers_of(find("gated_delta_rule")), "triton fused c16"]
    assert all("absent" in r for r in found[:-1])
    assert found[-1]["heads"] == 2 and "fla is absent" in capsys.readouterr().out
    assert main([*words[:3], "--schedule", "auto", *words[5:], "--peers", "none"]) == 0
    (row,) = rows(tmp_path / "e.json")
    assert row["who"] == "triton auto" and row["error_o"]["max"] < 5e-3


def test_kinds_of_gates_one_after_another(tmp_path, capsys):
    words = ["bench", "--target", "triton", "--schedule", "fused", *SMALL, "--dtype", "bfloat16", "--errors", "1", "--interpret",
             "--json", str(tmp_path / "e.json")]
    assert main([*words, "--gates", "layer,0,-50,mixed,alike"]) == 0
    found = rows(tmp_path / "e.json")
    assert [r["gates"] for r in found] == ["layer", "0", "-50", "mixed", "alike"]
    assert len({r["error_o"]["max"] for r in found}) == 5 and all("error" not in r for r in found)
    out = capsys.readouterr().out
    assert "[5/5]" in out and "1 x 50, 1/2, gates -50" in out
    assert main([*words, "--gates=-50"]) == 0 and rows(tmp_path / "e.json")[0]["error_o"] == found[2]["error_o"]


@pytest.mark.parametrize("value, why", [(0.0, "off by 1.0e+00"), (math.nan, "off by nan")])
def test_what_is_off_fails(value, why, gpu, monkeypatch, capsys):
    op = lambda q, k, v, g, beta, **options: (torch.full_like(v, value), torch.zeros(1, 2, 32, 16))
    monkeypatch.setattr(bench_calls, "function", lambda b: op)
    assert main(["bench", "--target", "triton", "--schedule", "fused", *SMALL, "--errors", "1", "--peers", "none"]) == 1
    assert why in capsys.readouterr().out


def test_a_row_that_stops_is_a_finding(gpu, monkeypatch, capsys):
    def stop(*a, **k):
        raise RuntimeError("no kernel image")
    monkeypatch.setattr(bench_calls, "function", lambda b: stop)
    assert main(["bench", "--target", "triton", "--schedule", "fused", *SMALL, "--errors", "1", "--peers", "none"]) == 1
    assert "RuntimeError: no kernel image" in capsys.readouterr().out


@pytest.mark.parametrize("words, why", [
    (["--target", "triton", "--errors", "0", "--interpret"], "errors: got 0; accepted: 1 seed or more"),
    (["--target", "triton", "--errors", "1"], "errors: got target triton, and torch sees no GPU here; accepted: --interpret"),
    (["--target", "pto", "--errors", "1"], "errors: got target pto, and it has no kernels for a GPU; accepted: --interpret"),
    (["--target", "triton", "--errors", "1", "--interpret", "--gates", "0,1"], "gates: got '1'; accepted: layer, uniform, mixed, "
                                                                              "alike, or a log decay of 0 or less"),
    (["--target", "triton", "--errors", "1", "--interpret", "--gates", "layers"], "gates: got 'layers'; accepted: layer,"),
    (["--target", "triton", "--gates", "0,-1"], "gates: got '0,-1'; accepted: one kind of gates, or several with --errors"),
    (["--target", "triton", "--errors", "1", "--interpret", "--schedule", "auto"], "interpret: got --interpret .*with --schedule "
                                                                                   "auto"),
    (["--target", "triton", "--errors", "1", "--interpret", "--peers", "fla"], "interpret: got --interpret .*peers")])
def test_bad_words(words, why, capsys):
    assert main(["bench", *SMALL, *words]) == 2
    assert re.search(why, capsys.readouterr().err)


@pytest.mark.parametrize("each", [(0.1, math.nan), (math.nan, 0.1)])
def test_a_head_that_is_no_number_is_the_worst(each):
    assert math.isnan(worst(each))


@pytest.mark.parametrize("o, state", [(1.0, 0.0), (0.0, 1.0), (math.nan, 0.0), (0.0, math.nan)])
def test_either_error_is_judged(o, state):
    assert "error" in bench_gpu.judged(o, state, 5e-3) and not bench_gpu.judged(o, state, None)
    assert not bench_gpu.judged(5e-3, 5e-3, 5e-3)
