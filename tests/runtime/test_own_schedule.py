"""--schedule FILE.py:NAME: a schedule that stands beside a page of one's own."""
import pytest

from gdn_codegen.cli import main

FILE = """
from gdn_codegen.ir.builder import algorithm, carried, cumsum, exp, last, lower
from gdn_codegen.schedule import Schedule


@algorithm(q="C K", k="C K", v="C V", a="C", S=carried("K V"))
def mine(q, k, v, a, S):
    G = cumsum(a)
    P = lower((q @ k.T) * exp(lower(G[:, None] - G[None, :])))
    y = P @ v + exp(G)[:, None] * (q @ S)
    S = exp(last(G)) * S + (exp(last(G) - G)[:, None] * k).T @ v
    return y, S


CUT = Schedule("cut", (("G", "P"), ("y", "S")))
NUMBER = 3
"""
SMALL = ["--chunk", "16", "--head-dim-k", "16", "--head-dim-v", "16"]


@pytest.fixture()
def file(tmp_path):
    path = tmp_path / "page.py"
    path.write_text(FILE)
    return path


def test_it_cuts_the_page_and_verifies(file, capsys):
    words = ["--target", "triton", "--algorithm", f"{file}:mine", "--schedule", f"{file}:CUT", *SMALL]
    assert main(["show", *words, "--kernels"]) == 0
    assert "G_P: parallel over chunks" in capsys.readouterr().out
    assert main(["verify", *words, "--quick"]) == 0
    assert main(["build", *words, "--out", str(file.parent)]) == 0
    assert [x.stem for x in (file.parent / "triton").glob("*.py")] == ["mine_c16_bthd_k16v16_cut"]


@pytest.mark.parametrize("spec, said", [
    ("page.py:NUMBER", "of type int; accepted: a Schedule"), ("page.py:NONE", "page.py has CUT"),
    ("other.py:CUT", "is not a Python file"), ("page.py:mine", "of type Algorithm; accepted: a Schedule"),
    ("fuse", "schedule: got 'fuse'; accepted: staged, ")])
def test_what_is_no_schedule_is_refused(file, spec, said, capsys, monkeypatch):
    monkeypatch.chdir(file.parent)
    assert main(["build", "--target", "triton", "--schedule", spec, "--out", "out"]) == 2
    assert said in capsys.readouterr().err and not (file.parent / "out").exists()
