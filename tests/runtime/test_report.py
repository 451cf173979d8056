"""`verify --report`: its numbers on made-up data, its files, and what it says of a target that is wrong."""
import json
import math
import sys

import pytest
import torch

from gdn_codegen.cli import main
from gdn_codegen.runtime.build import Build
from gdn_codegen.runtime.targets import runs
from gdn_codegen.targets import OWN
from gdn_codegen.tools import report, verify
from gdn_codegen.tools.cases import Case, inputs
from gdn_codegen.tools.report import Numbers, cases, measure, write_report
from gdn_codegen.tools.verify import reference, rms_error

SMALL = dict(head_dim_k=32, head_dim_v=32)
HERE = next((t for t in ("pto", *OWN) if runs(t, "cpu")), None)
needs_target = pytest.mark.skipif(HERE is None, reason="no target runs CPU tensors here")


# --- numbers ---------------------------------------------------------------------------------------------------------
def test_equal_is_perfect():
    x = torch.randn(40, 2, 8)
    m = measure(x, x.double())
    assert (m.rmse_over_rms, m.r2, m.max_error, m.not_finite) == (0.0, 1.0, 0.0, 0) and m.pearson_r == pytest.approx(1)


def test_an_all_zero_output_explains_nothing():
    want = torch.randn(1000, dtype=torch.float64) + 0.5
    m = measure(torch.zeros(1000), want)
    assert m.r2 <= 0 and m.pearson_r is None and m.rmse_over_rms == pytest.approx(1)
    assert m.max_error == want.abs().max().item()


def test_numbers_by_hand():
    """Errors 1, 0, -1, 0 against 1, 2, 3, 4: squared deviation 5, RMS sqrt(7.5)."""
    m = measure(torch.tensor([2.0, 2.0, 2.0, 4.0]), torch.tensor([1.0, 2.0, 3.0, 4.0]))
    assert m.rmse_over_rms == pytest.approx(math.sqrt(0.5 / 7.5)) and m.r2 == pytest.approx(1 - 2 / 5)
    assert m.pearson_r == pytest.approx(3 / math.sqrt(3 * 5)) and m.max_error == 1.0
    x = torch.tensor([1.0, 2.0, 3.0])
    assert measure(-x, x).pearson_r == pytest.approx(-1) and measure(10 * x + 3, x).pearson_r == pytest.approx(1)


def test_what_has_no_number():
    assert measure(torch.tensor([1.0, math.nan, math.inf]), torch.ones(3)) == Numbers(None, None, None, None, 2)
    assert measure(torch.ones(3), torch.ones(3)) == Numbers(0.0, None, None, 0.0, 0)
    assert measure(torch.zeros(0, 2, 8), torch.zeros(0, 2, 8)) == Numbers(0.0, None, None, 0.0, 0)


# --- cases -----------------------------------------------------------------------------------------------------------
def test_cases_are_each_length_all_of_them_and_seeded_packs():
    made = cases(report.LENGTHS)
    assert [c.lengths for _, c in made[:11]] == [(n,) for n in (1, 63, 64, 65, 127, 128, 129, 447, 512, 640, 1920)]
    assert made[11][1].lengths == report.LENGTHS
    packs = [c.lengths for _, c in made[12:]]
    assert len(packs) == report.PACKS and all(0 < sum(p) <= 4096 and min(p) >= 0 for p in packs) and len(set(packs)) > 1
    assert made == cases(report.LENGTHS) and len({n for n, _ in made}) == len(made)


# --- the reference ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("algorithm", ["gated_delta_rule", "simple_gla"])
def test_chunks_of_the_reference_are_the_recurrence(algorithm):
    b = Build("pto", algorithm=algorithm, **SMALL)
    assert report.reference_chunk(b)[0] == report.FAST
    case = Case((150, 0, 64), gate=-0.1)
    x = inputs(b, b.page.trace(), case)
    slow, fast = reference(b, case, x), reference(b, case, x, report.FAST)
    assert all(rms_error(fast[n], slow[n]) < 1e-13 for n in slow)


def test_a_page_whose_chunk_matters_is_run_token_by_token(monkeypatch):
    plain = report.reference
    monkeypatch.setattr(report, "reference", lambda b, case, x, chunk=1: {
        n: t * (1 + 1e-8 * (chunk > 1)) for n, t in plain(b, case, x, chunk).items()})
    chunk, line = report.reference_chunk(Build("pto", **SMALL))
    assert chunk == 1 and "token by token" in line


# --- files -----------------------------------------------------------------------------------------------------------
@pytest.mark.slow
@needs_target
def test_files(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    b = Build(HERE, **SMALL)
    assert write_report([b], tmp_path, lengths=(1, 65), packs=1)
    facts = json.loads((tmp_path / "report.json").read_text())
    (build,) = facts["builds"]
    assert facts["ok"] and (build["target"], build["module"]) == (HERE, b.name) and "chunks of 64" in build["reference"]
    assert [c["name"] for c in build["cases"]] == ["length 1", "length 65", "all 2 packed", "random pack 1"]
    text, shown = (tmp_path / "report.md").read_text(), capsys.readouterr().out
    for i, c in enumerate(build["cases"]):
        assert c["ok"] and set(c["outputs"]) == {"o", "final_state"}
        for m in c["outputs"].values():
            assert m["rmse_over_rms"] < 5e-3 and m["r2"] > 0.9999 and m["pearson_r"] > 0.9999 and m["max_error"] < 0.05
        assert (tmp_path / c["plot"]).read_bytes().startswith(b"\x89PNG\r\n\x1a\n") and f"]({c['plot']})" in text
        assert f"[{i + 1}/4] {c['name']}" in shown
    assert text.isascii() and text.count("| ok |") == 8 and "All comparisons hold" in text
    assert {p.suffix for p in tmp_path.iterdir()} == {".json", ".md", ".png"}  # no temporary is left


def test_a_plot_shows_got_against_float64(monkeypatch):
    """Every value, or as many as a plot takes, each with its own reference."""
    axes = pytest.importorskip("matplotlib.axes")
    seen, plain = [], axes.Axes.scatter
    monkeypatch.setattr(axes.Axes, "scatter", lambda self, x, y, **style: seen.append((x, y)) or plain(self, x, y, **style))
    want = {"o": torch.randn(3, 2, 4, dtype=torch.float64), "state": torch.arange(2 * report.POINTS, dtype=torch.float64)}
    got = {n: (10 * w).float() for n, w in want.items()}
    assert report.scatter("title", got, want).startswith(b"\x89PNG")
    (x, y), (xs, ys) = seen
    assert x == want["o"].flatten().tolist() and y == got["o"].flatten().double().tolist()
    assert len(set(xs)) == report.POINTS and ys == [10 * v for v in xs]


def test_without_matplotlib_it_refuses_before_it_works(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr(report, "reference_chunk", lambda b: pytest.fail("it worked first"))
    assert main(["verify", "--target", "pto", "--report", str(tmp_path)]) == 2
    assert "matplotlib, which draws its plots, is not installed; accepted: the same after pip install" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@needs_target
def test_a_report_says_what_did_not_run(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    left = {"triton": "its package is missing"}
    assert write_report([Build(HERE, **SMALL)], tmp_path / "a", lengths=(5,), packs=0, left=left)
    text = (tmp_path / "a" / "report.md").read_text()
    assert "All comparisons that ran hold." in text and "Not run: triton: its package is missing." in text
    assert json.loads((tmp_path / "a" / "report.json").read_text())["not_run"] == left
    assert not write_report([], tmp_path / "b", left=left) and "FAILED" in (tmp_path / "b" / "report.md").read_text()


@pytest.mark.slow
@needs_target
def test_a_wrong_target_fails_and_is_reported(tmp_path, monkeypatch, capsys):
    options = ["verify", "--target", HERE, "--quick", "--head-dim-k", "32", "--head-dim-v", "32", "--report"]
    for name, wrong in (("zero", lambda **x: (x["v"] * 0, x["initial_state"] * 0)),
                        ("nan", lambda **x: (x["v"] * math.nan, x["initial_state"])),
                        ("stops", lambda **x: (_ for _ in ()).throw(RuntimeError("a | race")))):
        monkeypatch.setattr(verify, "function", lambda b, wrong=wrong: wrong)
        assert main([*options, str(tmp_path / name)]) == 1
        assert "FAILED" in capsys.readouterr().out
        text = (tmp_path / name / "report.md").read_text()
        facts = json.loads((tmp_path / name / "report.json").read_text())
        assert not facts["ok"] and "FAILED" in text
        first = facts["builds"][0]["cases"][1]
        if name == "zero":
            assert first["outputs"]["o"]["r2"] <= 0
        elif name == "nan":
            assert first["outputs"]["o"]["not_finite"] == 65 * 2 * 32 and "values are not finite" in text
        else:
            assert first["error"] == "RuntimeError: a | race" and "RuntimeError: a / race" in text
