"""generated/ holds the default builds: each is rebuilt by the command in its own head, to the same bytes."""
import shlex
from pathlib import Path

import pytest

from gdn_codegen.cli import main
from gdn_codegen.runtime.build import Build
from gdn_codegen.runtime.call.choose import unfit
from gdn_codegen.targets import OWN

ROOT = Path(__file__).parents[1]
FILES = sorted((ROOT / "generated").rglob("*.py"))


def test_there_is_a_default_build_of_each_target_and_algorithm():
    """Of each that there is: a target may have no room, or no way, for a page."""
    from gdn_codegen import algorithms
    have = {(p.parent.name, p.stem) for p in FILES}
    for b in (Build(t, algorithm=a) for t in OWN for a in algorithms.names()):
        assert (b.target, b.name) in have or unfit(b), b.name


def test_the_walks_that_performance_md_measures_are_here():
    for schedule in ("fused_walk", "fused_walk_decay", "walk_longestfirst1_valueheads4_decay"):
        text = (ROOT / f"generated/tilelang/gdn_c64_bthd_{schedule}_sm90a.py").read_text()
        assert ("part_cost=PartCost(" in text) == schedule.endswith("decay") and "T.set_max_nreg(" in text
    (member,) = (ROOT / "generated/tilelang").glob("kimi_delta_attention_*_operand_walk_*_sm90a.py")
    assert "T.set_max_nreg(" in member.read_text()


@pytest.mark.parametrize("path", FILES, ids=lambda p: f"{p.parent.name}/{p.stem}")
def test_rebuilds_to_the_same_bytes(path, tmp_path):
    command = next(x for x in path.read_text().splitlines() if "gdn_codegen build" in x)
    words = shlex.split(command[command.index("gdn_codegen build"):])[1:]
    assert main([*words, "--out", str(tmp_path)]) == 0
    again = tmp_path / path.parent.name / path.name
    assert again.read_bytes() == path.read_bytes(), f"{path.name} changed: rebuild it with `{command.strip()}` and read the diff"
