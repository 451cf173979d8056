"""benchmarks/layers.py runs a small layer of transformers on a CPU, and all of its calls are served."""
import io
import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from gdn_codegen import integrations

ROOT = Path(__file__).parents[2]
PROGRAM = [sys.executable, ROOT / "benchmarks" / "layers.py"]


def run(*words):
    return subprocess.run([*PROGRAM, *words], capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)})


@pytest.mark.slow
@pytest.mark.long
def test_a_small_layer(tmp_path):
    pytest.importorskip("transformers", "5.23", reason="needs transformers, 5.23")
    done = run("transformers", "--small", "--runs", "1", "--json", str(tmp_path / "rows.json"))
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert [r["case"] for r in rows] == ["prefill 70", "decode 3", "training step 70"]
    assert all(r["served"] >= 3 and r["fell_back"] == [] and r["ms"] > 0 for r in rows)


class Half:
    """A host whose first case can be measured, and no other."""

    on_cpu, runs = True, 0

    def __init__(self, **sizes):
        self.layer = torch.nn.Linear(sizes["width"], 1)

    def on(self): ...
    def off(self): ...
    def cache(self): ...

    def run(self, x, cache):
        Half.runs += 1
        if Half.runs > 3:
            raise KeyError("the host's second case")
        integrations.record("half", "op", "" if Half.runs > 1 else "q: got this")
        return self.layer(x)


class Out(io.StringIO):
    """What has been flushed."""

    flushed = ""

    def flush(self):
        self.flushed = self.getvalue()


def test_a_run_that_is_cut_off_has_shown_the_rows_before(tmp_path, monkeypatch, capsys):
    space = runpy.run_path(str(PROGRAM[1]))
    monkeypatch.setitem(space["HOSTS"], "half", Half)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "stdout", Out())
    with pytest.raises(KeyError, match="the host's second case"):
        space["main"](["half", "--small", "--runs", "1", "--json", str(tmp_path / "rows.json")])
    row = sys.stdout.flushed.splitlines()[2]
    assert row.startswith("| half | prefill 70 | nan | ") and row.endswith(" | nan | 2 |")
    (row,) = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert row["served"] == 2 and capsys.readouterr().err == "half: op: left to the host (q: got this): 1\n"


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="a CPU's messages")
@pytest.mark.parametrize("words, said", [
    (["fla", "--small"], "HOST: got 'fla' on a CPU, where its convolution and norm do not run; accepted there: transformers"),
    (["another"], "HOST: got 'another'; accepted: transformers, fla"),
    pytest.param(["--runs", "0"], "--runs: got 0; accepted: at least 1", marks=pytest.mark.long)])
def test_other_words_are_refused(words, said):
    done = run(*words)
    assert done.returncode == 2 and said in done.stderr
