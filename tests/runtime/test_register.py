"""Targets and ops register once, under a name that is free; what cannot be loaded is left out."""
import re
from dataclasses import replace
from importlib import metadata

import pytest
import torch
from choices import a_call

from gdn_codegen import chunk_gated_delta_rule, cli_parser, options, targets
from gdn_codegen.cli import main
from gdn_codegen.ir.ops import op
from gdn_codegen.ir.types import Tile
from gdn_codegen.runtime.build import Build, render
from gdn_codegen.runtime.call import choose as choose_build
from gdn_codegen.runtime.call.device import Facts
from gdn_codegen.runtime.call.tables import Extent
from gdn_codegen.runtime.targets import choose, findings, tunable
from gdn_codegen.targets.candidates import Candidate, Space
from gdn_codegen.targets.gradient_plans import ONE
from gdn_codegen.targets.machine import Finding
from gdn_codegen.tools.candidates import candidates


@pytest.fixture(autouse=True)
def _as_before(monkeypatch):
    targets.names()
    monkeypatch.setattr(targets, "_known", dict(targets._known))


def mine(**fields):
    """Triton under another name."""
    return replace(targets.find("triton"), **{"name": "mine", **fields})


def test_a_registered_target_is_like_ours(capsys):
    lines = lambda: [Finding("mine", "CPU tensors", True, "yes, it runs")]
    x = mine(toolchain=targets.Toolchain(findings=lines), preference=200)
    assert targets.register(x) is x and targets.register(x) is x
    assert targets.names() == (*targets.OWN, "mine") and lines()[0] in findings()
    assert render(Build("mine")).replace("--target mine", "--target triton") == render(Build("triton"))
    assert choose("cpu", "mine") == "mine" and choose("cpu") != "mine"
    with pytest.raises(ValueError, match="target: got 'mine', and it has no kernels for npu tensors"):
        choose("npu", "mine")
    assert main(["list"]) == 0 and "\n  mine\n" in capsys.readouterr().out


@pytest.mark.parametrize("gradients, why", [
    ({"gpu": (ONE,)}, "gradients: got plans for 'gpu'; accepted: cpu, cuda"),
    ({"cpu": ()}, "gradients: got .* for 'cpu'; accepted: a tuple of a GradientPlan or more"),
    ({"cpu": ONE}, "gradients: got GradientPlan.* for 'cpu'; accepted: a tuple"),
    ({"cpu": (replace(ONE, states=()),)}, "for 'cpu'; accepted: a tuple .*, each with schedules for the states")])
def test_plans_that_no_gradient_could_use_are_refused(gradients, why):
    with pytest.raises(ValueError, match=why):
        targets.register(mine(gradients=gradients))
    assert "mine" not in targets.names()


def test_a_device_without_plans_is_named():
    """The target has some, for another device."""
    targets.register(mine(gradients={"cuda": (ONE,)}, toolchain=targets.Toolchain()))
    q = torch.randn(1, 5, 1, 16, requires_grad=True)
    with pytest.raises(ValueError, match="mine has no plans of gradients on cpu"):
        chunk_gated_delta_rule(q, q, q, -torch.rand(1, 5, 1), torch.rand(1, 5, 1), target="mine")


def test_a_registered_target_brings_the_schedule_of_builds_that_name_none():
    lowering = targets.find("triton").lowering
    targets.register(mine(archs={"sm_42a": replace(lowering, schedule="replay")}, toolchain=targets.Toolchain()))
    words = ["build", "--target", "mine", "--arch", "sm_42a", "--set", "kernels=o,S"]
    (b,) = options.builds(cli_parser.parser().parse_args(words))
    assert b.plan.name == "replay"
    names = lambda arch: [Build("mine", schedule=n, arch=arch).name for n in ("replay", "fused")]
    assert names("sm_42a") == ["gdn_c64_bthd_sm42a", "gdn_c64_bthd_fused_sm42a"]
    assert names("") == ["gdn_c64_bthd_replay", "gdn_c64_bthd"]


def test_a_registered_target_brings_its_model_and_its_candidates(monkeypatch):
    """Dispatch and `tune` take what it brings, and know the architectures that it builds for."""
    def model(x):
        return [Candidate("replay", "for my GPU", 32, x.arch)] if x.arch == "sm_42a" else []
    lowering = targets.find("triton").lowering
    targets.register(mine(archs={"sm_42a": lowering}, model=model, spaces=(Space(("staged",), {"v_block": (0, 64)}, (16,)),)))
    assert targets.architecture("sm_42") == "sm_42a" and targets.architecture("sm_43") == ""
    call = a_call(Extent(1, 1, 1, 512), device="meta", target="mine")
    choice = choose_build.choice(call, Facts("meta", ("my GPU",), targets.architecture("sm_42")))
    assert choice.build == Build("mine", 32, schedule="replay", arch="sm_42a")
    assert ("chosen by model", "for my GPU") in choice.why
    assert tunable() == ["tilelang", "triton", "mine"] and cli_parser.parser().parse_args(["tune", "--target", "mine"])
    assert [(b.target, b.chunk, b.plan.name, b.plan.v_block) for b in candidates(Build("mine"), "")] == [
        ("mine", 16, "staged", 0), ("mine", 16, "staged", 64)]


def test_without_candidates_a_target_takes_the_first_schedule_for_any_device(monkeypatch):
    targets.register(mine(model=targets.Target.model, spaces=()))
    call = a_call(Extent(1, 1, 1, 512), device="meta", target="mine")
    assert choose_build.choice(call).build == Build("mine") and "mine" not in tunable()


def test_bench_refuses_a_target_without_kernels_for_a_gpu(capsys):
    targets.register(mine(runs_on=("cpu",), gradients={"cpu": (ONE,)}))
    assert main(["bench", "--target", "mine"]) == 2
    assert "target: got 'mine', which has no kernels for a GPU; accepted: tilelang, triton, pto, all" in capsys.readouterr().err


def test_a_target_may_say_that_kernels_are_too_large():
    targets.register(mine(too_large=lambda p: "" if p.sizes["V"] < 100 else "V is large"))
    small, large = (Build("mine", 16, head_dim_k=32, head_dim_v=n) for n in (32, 128))
    assert choose_build.fits(small) and choose_build.unfit(large) == "V is large"


def test_preference_decides_what_auto_is():
    targets.register(mine(toolchain=targets.Toolchain(), preference=-1))
    assert choose("cpu") == choose("cuda") == "mine" and choose("npu", "pto") == "pto"


@pytest.mark.parametrize("target, said", [
    (3, "target: got int; accepted: a gdn_codegen.targets.Target"),
    ("triton", "target: got str; accepted"),
    (dict(name="auto"), "name: got 'auto'; accepted: an identifier other than all and auto"),
    (dict(name="my target"), "name: got 'my target'; accepted: an identifier"),
    (dict(name="triton"), "name: got 'triton', which another target has; accepted: a name that is free")])
def test_what_cannot_be_registered(target, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        targets.register(mine(**target) if isinstance(target, dict) else target)
    assert targets.find("triton").name == "triton" and targets.names() == targets.OWN


def test_a_target_that_is_not_there_names_those_that_are():
    with pytest.raises(ValueError, match=r"target: got 'mine'; accepted: triton, tilelang, pto"):
        Build("mine")


class Point:
    """As an entry point of an installed package."""

    def __init__(self, name, load):
        self.name, self.value, self.load = name, f"{name}:TARGET", load


def broken():
    raise ImportError("no module named toolchain")


def test_entry_points_register_and_a_broken_one_is_left_out(monkeypatch):
    points = [Point("bad", broken), Point("not_one", lambda: 3), Point("mine", mine)]
    monkeypatch.setattr(metadata, "entry_points", lambda group: points if group == "gdn_codegen.targets" else [])
    monkeypatch.setattr(targets, "_searched", [])
    with pytest.warns(UserWarning) as said:
        assert targets.names() == (*targets.OWN, "mine")
    assert [str(w.message) for w in said] == [
        "gdn_codegen: the target bad (bad:TARGET) is left out: ImportError: no module named toolchain",
        "gdn_codegen: the target not_one (not_one:TARGET) is left out: ValueError: target: got int; accepted: a "
        "gdn_codegen.targets.Target"]


def test_an_op_that_there_is_cannot_be_added():
    with pytest.raises(ValueError, match="name: got 'exp', an op that is in the table"):
        op("exp", "again", lambda attrs, x: Tile(()))
