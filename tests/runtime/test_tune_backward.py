"""`gdn_codegen tune --backward`: what it times, and that gradients choose from its table. Times are a function of the build."""
from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from choices import a_call

from gdn_codegen import cli
from gdn_codegen.runtime.build import Build
from gdn_codegen.runtime.call import gradient_builds, tables
from gdn_codegen.runtime.call.device import Facts
from gdn_codegen.runtime.call.tables import Extent
from gdn_codegen.runtime.targets import runs
from gdn_codegen.schedule import varied
from gdn_codegen.tools import tune, tune_backward, tune_jobs
from gdn_codegen.tools.shapes import Shape
from gdn_codegen.tools.tune_backward import Gradients

ABOUT = Build("triton", algorithm="mamba2", head_dim_k=32, head_dim_v=64)
SHAPES = (Shape("long", (4096,), 2, 2), Shape("grouped", (512, 512), 1, 2))
NAMES = ("NVIDIA H200", "sm_90 x 132", "sm_90")


@dataclass
class Fake:
    """A meter by which chunks of 32 tokens, four warps, and walks for the states in two blocks of V are fast."""

    seen: list[str] = field(default_factory=list)
    bad: str = ""

    def wrong(self, b: Build) -> str:
        return "off by 0.5" if b.name == self.bad else ""

    def workspace(self, b: Build, s: Shape) -> int:
        return 0

    def time(self, b: Build, s: Shape) -> dict[str, Any]:
        self.seen.append(b.name)
        fast = (b.chunk == 32) + (b.plan.warps == 4) + (b.plan.v_block == 64 and b.algorithm == "mamba2.states")
        return {"ms": 2.0 ** -fast}


@pytest.fixture(autouse=True)
def anew(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(tables, "versions", lambda target: {"gdn_codegen": "0"})
    for kept in (gradient_builds._fitting, tune_jobs.gradient_choice, tables.rows):
        kept.cache_clear()
    yield
    gradient_builds._fitting.cache_clear()
    tables.rows.cache_clear()


@pytest.fixture
def todo(monkeypatch: pytest.MonkeyPatch) -> list[tune_jobs.Job]:
    """Few fields, so that few candidates are lowered."""
    monkeypatch.setattr(tune_backward, "FIELDS", {"triton": {"v_block": (0, 64), "warps": (4, 8)}})
    monkeypatch.setattr(tune_backward, "SCHEDULES", {"states": (("fused_walk", {}),), "gradient": (("gradient", {}),)})
    return tune_backward.jobs([ABOUT], SHAPES, "", 132)


@pytest.mark.parametrize("target", ["tilelang", "triton"])
def test_what_a_gradient_takes_now_depends_on_the_number_of_walks(target: str) -> None:
    """With a gate for each channel few walks come in parts, as in a call."""
    b = gradient_builds.asked_of(Build(target, algorithm="kimi_delta_attention", dtype="bfloat16"), True)
    back = gradient_builds.undecided(b, True).gradient
    arch = "sm_90a" if target == "tilelang" else ""
    few, many = (tune_jobs.gradient_choice(back, arch, Extent(h, h, 1, 32768, False).shape_class, 132) for h in (16, 128))
    assert few.plan.partition == "decay" and not many.plan.partition
    stored = "bounded" if target == "tilelang" else "stored"  # by the states' module, where walks come in parts
    assert (few.algorithm, many.algorithm) == tuple(f"kimi_delta_attention.{x}_gradient" for x in (stored, "stored"))


def test_what_is_timed(todo: list[tune_jobs.Job]) -> None:
    """At each shape first what a gradient takes now; both modules; gradients of rows as the head counts want them."""
    assert [(j.build.algorithm, j.build.chunk, len(j.lens)) for j in todo[:4]] == [
        (f"mamba2.{kind}", 64, n) for n in (1, 2) for kind in ("gradient", "states")]
    assert {(j.build.algorithm, j.HV // j.H, str(j.build.contract)) for j in todo} == {
        ("mamba2.states", 1, "S_chunks=float16"), ("mamba2.states", 2, "S_chunks=float16"),
        ("mamba2.gradient", 1, "S_chunks=float16,d_k=float16,d_q=float16"), ("mamba2.gradient", 2, "S_chunks=float16")}
    assert len({j.key for j in todo}) == len(todo) == 2 * (2 * 2 * 4 + 2)  # what is taken now is no candidate here


def test_candidates_made_for_the_architecture() -> None:
    b = gradient_builds.asked_of(Build("tilelang", algorithm="gla"), True)
    found = list(tune_backward.candidates(b, "sm_90a"))
    assert {x.arch for x in found} == {"sm_90a", ""} and {x.chunk for x in found} == {64, 32}
    assert varied("gradient", "sm_90a", v_block=64, stages=2) in [x.plan for x in found]


@pytest.mark.slow
def test_gradients_choose_from_the_table(todo: list[tune_jobs.Job], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fastest pair of one chunk, without what is wrong; for calls of such a size and contract alone."""
    path, said = tmp_path / "backward.json", []
    wrong = next(j.build for j in todo if (j.build.chunk, j.build.plan.warps, j.build.algorithm) == (32, 4, "mamba2.gradient"))
    meter = Fake(bad=wrong.name)
    assert tune.tuned(tables.BACKWARD, todo, NAMES, "", 132, meter, path, say=said.append) == 0
    assert any("dropped: off by 0.5" in line for line in said) and wrong.name not in meter.seen
    assert {r["build"]["target"] for r in json.loads(path.read_text())["rows"]} == {"triton"}
    monkeypatch.setattr(tables, "own_path", lambda device, name: path)
    monkeypatch.setattr(gradient_builds, "targets_for", lambda device, asked: ["triton"])
    monkeypatch.setattr(gradient_builds, "facts", lambda device: Facts("cpu", NAMES, "", 132))

    def chosen(extent: Extent, **asked: Any) -> gradient_builds.Builds:
        return gradient_builds.builds_for("mamba2", a_call(extent, torch.float16, dims=(32, 64), **asked))
    b = chosen(Extent(2, 2, 1, 4096))
    assert (b.states.chunk, b.states.plan.warps, b.states.plan.v_block) == (32, 4, 64)
    assert (b.gradient.chunk, b.gradient.plan.name) == (32, "gradient") and b.gradient != wrong
    assert chosen(Extent(2, 2, 1, 4096), chunk_size=16).gradient.chunk == 16
    assert chosen(Extent(2, 2, 64, 4096 * 64)).gradient.chunk == 64


@pytest.mark.skipif(not runs("triton", "cpu"), reason="Triton does not run here")
def test_a_meter_runs_both_modules(todo: list[tune_jobs.Job]) -> None:
    """The check and a call, in Triton's interpreter; the time is that of one run. The slot of no sequence's chunk stays NaN."""
    @dataclass
    class Here(Gradients):
        device: str = "cpu"
        ran: int = 0

        def measured(self, run: Any) -> float:
            run()
            self.ran += 1
            return 1.0

        def alive(self) -> None:
            pass
    meter, s = Here(), Shape("small", (32, 3), 1, 2)
    for b in {j.build.algorithm: j.build for j in todo if j.build.chunk == 32 and j.HV > j.H}.values():
        assert meter.wrong(b) == "" and meter.time(b, s) == {"ms": 1.0} and meter.workspace(b, s) >= 0
    assert meter.ran == 2


def test_what_cannot_be_asked(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for words, said in (((), "a machine where torch sees no GPU"), (("--decode",), "decode: got it with --backward"),
                        (("--unit-keys",), "unit_keys: got it with --backward")):
        assert cli.main(["tune", "--backward", *words]) == 2 and said in capsys.readouterr().err
    assert cli.main(["tune", "--algorithm", "gla"]) == 2
    assert "algorithm: got" in capsys.readouterr().err
