"""What `bench` compiles before it measures: first calls in processes of their own."""
import re
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch

from gdn_codegen.algorithms import find
from gdn_codegen.cli import main
from gdn_codegen.runtime.build import Build
from gdn_codegen.schedule import varied
from gdn_codegen.tools import bench_ahead
from gdn_codegen.tools.bench_ahead import FirstCall, compile_first, first_calls
from gdn_codegen.tools.bench_calls import Auto
from gdn_codegen.tools.peer_ops import OPS, peers_of, rivals
from gdn_codegen.tools.peers import Peer
from gdn_codegen.tools.shapes import Shape

TWO = (Shape("one", (20,), 1, 1), Shape("two", (9, 3), 1, 2))
GDN = find("gated_delta_rule")
ABOUT = ("mixed,0", 0, "float16", (16, 16))
CALL = FirstCall(Build("tilelang", 16, schedule=varied("fused"), head_dim_k=16, head_dim_v=16), TWO[0], "gated_delta_rule",
                 "float16", (16, 16), "0", 0, device="cpu")


def test_each_row_of_each_shape(no_peers):
    """Peers that are absent compile nothing."""
    builds = [CALL.who, Auto(OPS["gated_delta_rule"], "triton")]
    found = first_calls(builds, TWO, rivals("all", GDN), GDN, *ABOUT)
    assert [(c.shape.name, c.who) for c in found] == [(s.name, b) for s in TWO for b in builds]
    assert {(c.algorithm, c.gates, c.backward, c.device) for c in found} == {("gated_delta_rule", "mixed", False, "cuda")}
    assert [c.name for c in found[:2]] == [f"one: tilelang {CALL.who.name}", "one: triton auto"]
    assert all(c.backward for c in first_calls(builds, TWO, [], GDN, *ABOUT, backward=True))


@pytest.mark.slow
def test_processes_leave_what_rows_then_find(monkeypatch, tmp_path, capfd):
    """Each call is made in a process of its own, side by side; one that fails does not stop the others."""
    monkeypatch.setenv("GDN_CODEGEN_CACHE", str(tmp_path / "cache"))
    other = replace(CALL, who=replace(CALL.who, chunk=32), shape=TWO[1])
    wrong = replace(CALL, algorithm="no_such_page")
    compile_first([CALL, other, wrong], 2)
    modules = sorted(p.name for p in (tmp_path / "cache" / "modules" / "tilelang").glob("*.py"))
    assert len(modules) == 2 and all(m.startswith(w) for m, w in zip(modules, ("gdn_c16", "gdn_c32"), strict=True))
    out, said = capfd.readouterr()
    assert "gdn_codegen: compiling for 3 rows in 2 processes (--jobs)" in said and not out
    lines = re.findall(r"gdn_codegen: \[(\d)/3\] (one|two): \S+ \S+: \d+ s(.*)", said)
    assert [n for n, _, _ in lines] == ["1", "2", "3"]
    assert [how for _, _, how in lines if how] == [", and failed (exit status 1)"]


@pytest.mark.parametrize("calls, jobs", [([CALL], 4), ([CALL, CALL], 1), ([], None)])
def test_nothing_to_gain(calls, jobs, monkeypatch):
    monkeypatch.setattr(bench_ahead, "_alone", lambda c: pytest.fail("a process"))
    compile_first(calls, jobs)


@pytest.mark.parametrize("calls, jobs, threads", [(2, 8, 4), (3, 8, 2), (5, 3, 2)])
def test_cores_that_are_left_are_threads(calls, jobs, threads, monkeypatch):
    made = []
    monkeypatch.setattr(bench_ahead, "_alone", made.append)
    compile_first([CALL] * calls, jobs)
    assert [c.threads for c in made] == [threads] * calls


@pytest.fixture
def within(monkeypatch):
    """The threads of the contexts in which a row is."""
    from gdn_codegen.tools import bench_backward, bench_errors, bench_gpu
    inside = []

    @contextmanager
    def entered(threads):
        inside.append(threads)
        yield
        inside.pop()
    for m in (bench_ahead, bench_backward, bench_errors, bench_gpu):
        monkeypatch.setattr(m, "compiled_side_by_side", entered)
    return inside


def test_configurations_of_peers_compile_in_threads(within, monkeypatch):
    """In first calls, and where rows are measured; ours have none."""
    from gdn_codegen.tools import bench_backward, bench_errors, bench_gpu
    seen, peer = [], peers_of(GDN)["fla"]
    monkeypatch.setattr(Peer, "prepare", lambda self, x: lambda: seen.append(list(within)))
    monkeypatch.setattr(bench_ahead, "ours_of", lambda who, x: (None, None, Peer.prepare.__get__(peer)))
    for who in ("fla", CALL.who):
        replace(CALL, who=who, threads=3).make()
    assert seen == [[3], [1]]
    auto, row = Auto(OPS["gated_delta_rule"], "triton"), lambda *a: {"within": list(within)}
    for m in (bench_gpu, bench_errors):
        monkeypatch.setattr(m, "measured", row)
        monkeypatch.setattr(m, "ours_of", lambda who, x: (CALL.who, "ours", str, 1))
    monkeypatch.setattr(bench_gpu, "reference", lambda x: None)
    one = TWO[0]
    found = [bench_gpu.shape_rows(one, None, [CALL.who], [peer], 1, None, 5),
             bench_errors.shape_rows(one, "layer", [(None, None)], [CALL.who], [peer], False, 5)]
    assert [list(x) for x in found] == [[{"within": [5]}, {"within": []}]] * 2
    assert [r["within"] for r in bench_backward.rows(one, [auto], [peer], row, 5)] == [[5], [1]]


def test_jobs_that_mean_nothing(capsys):
    for words, why in ((["--target", "pto", "--jobs", "2"], "jobs: got 2 with --target pto"),
                       (["--target", "triton", "--jobs", "0"], "jobs: got 0; accepted: 1 or more"),
                       (["--target", "triton", "--errors", "1", "--interpret", "--jobs", "2"], "jobs: got 2 with --interpret")):
        assert main(["bench", *words]) == 2
        assert why in capsys.readouterr().err


@pytest.mark.parametrize("way", [[], ["--errors", "1"], ["--backward"]], ids=" ".join)
def test_the_command_compiles_first(way, monkeypatch, no_peers):
    """Each way of the command, after it has refused what it refuses, and before it measures."""
    from gdn_codegen.tools import bench_backward, bench_errors, bench_gpu

    class Measures(Exception):
        pass

    def begins(calls, jobs):
        raise Measures(len(calls), jobs, {c.backward for c in calls})
    for m in (bench_gpu, bench_errors, bench_backward):
        monkeypatch.setattr(m, "compile_first", begins)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    with pytest.raises(Measures) as e:
        main(["bench", "--target", "all", "--schedule", "auto", "--tokens", "20", "--heads", "1", "--jobs", "3", *way])
    assert e.value.args == (2, 3, {way == ["--backward"]})
