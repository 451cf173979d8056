"""benchmarks/layers.py runs a small layer of transformers on a CPU, and all of its calls are served."""
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

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


@pytest.mark.slow
@pytest.mark.parametrize("words, said", [
    (["another"], "HOST: got 'another'; accepted: transformers, fla"),
    pytest.param(["--runs", "0"], "--runs: got 0; accepted: at least 1", marks=pytest.mark.long)])
def test_other_words_are_refused(words, said):
    done = run(*words)
    assert done.returncode == 2 and said in done.stderr
