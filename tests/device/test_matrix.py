"""The matrix itself, on CPU tensors; and a small one on a GPU. The whole one: python tests/device/matrix.py --out result.json"""
import json
import subprocess
import sys
import time
from itertools import islice
from pathlib import Path

import matrix
import matrix_run
import pytest
import torch
from calls import MARK
from matrix_page import page
from matrix_plan import FIELDS, NAMED, Cover, drawn, goes, options, schedules, way
from matrix_reference import chunked, expected_on
from reference import expected, problem, rms_error

from gdn_codegen import chunk_gated_delta_rule
from gdn_codegen.schedule import varied

MATRIX = Path(__file__).with_name("matrix.py")
ROW = {"schedule": "fused", **dict.fromkeys(FIELDS),
       "K": 16, "V": 16, "chunk": 16, "dtype": "float16", "layout": "bthd", "heads": (1, 2), "gate": "log",
       "gate_dtype": "float32", "beta": "given", "beta_dtype": "float32", "l2norm": False, "state": "pool in place",
       "state_dtype": "float32", "v_first": False, "views": True, "checkpoints": 0, "lengths": "ragged", "alike": None,
       "beta_value": None, "gate_mean": -0.1, "out": True, "extra_rows": 3, "skip": False}


def cover(seed=0, fits=lambda *a: "", hopper=True):
    return Cover("tilelang", seed, hopper, not hopper, fits)


# --- the draw ---------------------------------------------------------------------------------------------------------
@pytest.mark.slow
def test_each_pair_is_met_and_a_seed_is_a_draw():
    c = cover()
    rows = [r for rows in c.rows() for r in rows]
    assert not c.left and not c.without_room and all(map(goes, rows))
    met = set().union(*map(c.pairs_of, rows))
    for pair in ((("schedule", "fused_walk on sm_90a"), ("K", 64)), (("K", 60), ("V", 60)), (("alike", 0.0), ("beta_value", 2.0)),
                 (("schedule", "decode"), ("state", "pool to pool")), (("chunk", None), ("dtype", "float32")),
                 (("value_heads", 4), ("partition", "longest first")), (("v_block", 32), ("inverse", "doubling"))):
        assert {pair, pair[::-1]} & met
    assert list(islice(cover().rows(), 20)) == list(islice(cover().rows(), 20)) != list(islice(cover(1).rows(), 20))


@pytest.mark.slow
def test_what_has_no_room_is_tried_and_given_up():
    c = cover(fits=lambda target, way, row: "too large" if row["K"] == 64 else "", hopper=False)
    rows = [r for rows in c.rows() for r in rows]
    assert not c.left and c.without_room and any("no room" in r for r in rows)
    assert all(("no room" in r) == (r["K"] == 64) for r in rows)
    met, of = c.met(r for r in rows if "no room" not in r)
    assert met == of > c.pairs - len(c.without_room), "a pair that was given up and met later is not counted"


def test_levels_make_schedules_of_the_package():
    for target in ("tilelang", "triton"):
        assert {"auto", "decode", *NAMED} <= set(schedules(target, False)) <= set(schedules(target, True))
        assert {"inverse", "v_block", "partition"} < set(options(target, False)) <= set(options(target, True)) < set(ROW)
    row = {**ROW, "schedule": "walk on sm_90a", "partition": "longest first", "value_heads": 4}
    assert (way(row).plan, way(row).arch, way(row).parts) == (
        varied("walk", "sm_90a", partition="decay", longest_first=True, value_heads=4), "sm_90a", 2)
    assert way({**ROW, "v_block": 32, "partition": "exact"}).plan == varied("fused", v_block=32, partition="exact")
    assert way({**ROW, "schedule": "auto in parts"}) == type(way(ROW))(parts=2)


# --- what calls are compared with -------------------------------------------------------------------------------------
@pytest.mark.parametrize("gate", [-0.1, "mixed"])
def test_the_recurrence_at_once_is_the_recurrence(gate):
    x = problem([5, 0, 33, 1], 2, 4, 16, 32, gate=gate)
    for got, want in zip(expected_on("cpu")(x), expected(x), strict=True):
        assert rms_error(got, want) < 1e-12


def test_the_chunked_form_rounds_and_no_more():
    x = problem([70, 3], 1, 2, 32, 32, gate=0.0, beta=1.0, same_keys=True)
    want = expected(x)
    off = {d: max(map(rms_error, chunked(x, d, 16, "cpu"), want)) for d in ("float32", "tf32", "float16", "bfloat16")}
    assert off["float32"] < 1e-5 < off["float16"] < off["bfloat16"] < 2e-2 and 1e-5 < off["tf32"] < 5e-3


def spoiled(how):
    def op(**said):
        if how == "raise":
            raise RuntimeError("CUDA error: an illegal memory access")
        if how == "refuse":
            raise ValueError("chunk_size: got 128; accepted: 16")
        if how == "refuse badly":
            raise ValueError("no")
        results = chunk_gated_delta_rule(**said)
        if how == "o":
            results[0].mul_(torch.where(results[0] == MARK, 1.0, 1.1))
        if how == "slot":
            said["initial_state"].as_strided((1,), (1,), said["initial_state"].shape[1:].numel()).add_(1)
        return results
    return op


@pytest.mark.parametrize("how, status, why", [
    ("", "ok", ""), ("o", "wrong", "('o', "), ("slot", "wrong", "between slots"), ("raise", "error", "RuntimeError: CUDA"),
    ("refuse", "refused", "ValueError: chunk_size"), ("refuse badly", "error", "ValueError: no")])
def test_what_came_of_a_call(how, status, why, monkeypatch):
    """Seed 1 has slots apart. The op's way on another device keeps views, and sees what is written between slots."""
    monkeypatch.setattr(matrix_run, "chunk_gated_delta_rule", spoiled(how))
    got = matrix_run.called("triton", ROW, 1, "cpu")
    assert got["status"] == status and why in got.get("why", ""), got
    assert drawn("triton", ROW, varied("fused"), 1, False).views


# --- processes and the page ---------------------------------------------------------------------------------------------
WORKER = """
import json, sys, time
for line in sys.stdin:
    job = json.loads(line)
    if job["do"] == "crash": sys.exit("lost")
    if job["do"] == "hang": time.sleep(99)
    print(json.dumps({"status": "ok"}), flush=True)
"""


@pytest.mark.slow
def test_a_crash_and_a_hang_end_one_process_and_the_rest_is_done(tmp_path):
    pool, done = matrix_run.Pool([sys.executable, "-c", WORKER], 2, tmp_path, 1.5, grace=1), []
    todo = iter([[{"do": "ok", "n": 0}, {"do": "crash", "n": 1}, {"do": "ok", "n": 2}],
                 [{"do": "hang", "n": 3}, {"do": "ok", "n": 4}]])
    start = time.monotonic()
    while time.monotonic() - start < 20:
        pool.feed(todo)
        if not pool.left():
            break
        done += list(pool.results(0.2))
    pool.end()
    said = {job["n"]: (r["status"], r.get("why", "")) for job, r in done}
    assert sorted(said) == [0, 1, 2, 3, 4] and {said[n][0] for n in (0, 2, 4)} == {"ok"}
    assert "process ended" in said[1][1] and "no answer" in said[3][1] and said[1][0] == said[3][0] == "error"


@pytest.mark.slow
def test_a_process_that_has_compiled_gets_more_time(tmp_path):
    slow = [sys.executable, "-c", WORKER.replace("sleep(99)", "sleep(2)")]
    pool, done = matrix_run.Pool(slow, 1, tmp_path, 0.5, grace=20), []
    todo = iter([[{"do": "hang", "n": 0}]])
    start = time.monotonic()
    while time.monotonic() - start < 20:
        pool.feed(todo)
        if not pool.left():
            break
        done += list(pool.results(0.2))
    pool.end()
    assert [r["status"] for _, r in done] == ["ok"]


def test_workers_take_gpus_in_turn(tmp_path):
    shows = """
import os, sys, json
for _ in sys.stdin: print(json.dumps({"status": os.environ["CUDA_VISIBLE_DEVICES"]}), flush=True)
"""
    pool, done = matrix_run.Pool([sys.executable, "-c", shows], 3, tmp_path, 20, gpus=["4", "7"]), []
    pool.feed(iter([[{"n": n}] for n in range(3)]))
    start = time.monotonic()
    while pool.left() and time.monotonic() - start < 20:
        done += list(pool.results(0.2))
    pool.end()
    assert sorted(r["status"] for _, r in done) == ["4", "4", "7"]


def test_what_is_tried_again_is_what_has_no_result():
    jobs = [[{"target": "triton", "n": n, "call": c, "row": {}} for c in range(2)] for n in range(4)]
    said = {(0, 0): "ok", (0, 1): "slow", (1, 0): "ok", (1, 1): "refused", (2, 0): "ok", (2, 1): "wrong", (3, 0): "not admitted"}
    calls = [{"target": "triton", "n": n, "call": c, "status": s} for (n, c), s in said.items()]
    left = matrix.unsettled(jobs, calls)
    assert [[(j["n"], j["call"]) for j in js] for js in left] == [[(2, 1)], [(3, 1)], [(0, 1)]], "failed, not run, slow"


def test_the_page_names_failures_and_how_to_repeat_them():
    call = lambda n, status, why="": {"target": "triton", "n": n, "call": 0, "seed": 1, "row": {**ROW, "alike": 0.0},
                                      "status": status, "why": why, "build": "triton_gdn", "seconds": 1.0}
    result = {"commit": "abc", "date": "2026-01-01", "device": "a GPU", "versions": {"torch": "2"}, "seed": 5, "on": "cuda",
              "admission": True, "asked": 0, "seconds": 9, "workers": 2, "builds": 3, "pairs": {"triton": (5, 7)},
              "not_run": ["triton:9.0"], "calls": [
                  call(0, "ok"), call(1, "wrong", "('o', 0.5, 0.01)"),
                  call(2, "refused", "ValueError: K: got 3; accepted: 4 \u2713"), call(3, "error", "RuntimeError: CUDA error")]}
    text = page(result)
    assert text.isascii() and "abc" in text and "4 calls" in text and "triton 5 of 7" in text
    assert "1 calls or more, from triton:9.0" in text
    assert "- all was run\n" in page({**result, "not_run": []})
    assert "- ended after 3 builds, as asked" in page({**result, "not_run": [], "asked": 3})
    assert "matrix.py --seed 5 --only triton:1`" in text and "o off" in text and "alike=0.0" in text
    assert "triton: ValueError: K: got n; accepted: n" in text and "RuntimeError: CUDA error" in text


# --- on a GPU ---------------------------------------------------------------------------------------------------------
@pytest.mark.device
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_a_small_matrix(tmp_path):
    out = tmp_path / "result.json"
    command = [sys.executable, str(MATRIX), "--builds", "24", "--budget", "240", "--out", str(out)]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    calls = json.loads(out.read_text())["calls"]
    bad = [c for c in calls if c["status"] in ("wrong", "error")]
    assert len(calls) > 20 and not bad, run.stdout[-4000:]
