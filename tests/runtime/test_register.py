"""Targets and ops register once, under a name that is free; what cannot be loaded is left out."""
import re
from dataclasses import replace
from importlib import metadata

import pytest

from gdn_codegen import targets
from gdn_codegen.cli import main
from gdn_codegen.ir.ops import op
from gdn_codegen.ir.types import Tile
from gdn_codegen.runtime.build import Build, render
from gdn_codegen.runtime.targets import choose, findings
from gdn_codegen.targets.machine import Finding


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
