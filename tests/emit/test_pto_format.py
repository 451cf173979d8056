"""Emitted PTO C++ is ASCII and laid out as .clang-format says, with Doxygen comments and descriptive exported names."""
import re
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from reference import ON_CORES

from gdn_codegen.runtime.build import Build, lowered, render
from gdn_codegen.schedule import named

clang_format = pytest.importorskip("clang_format", reason="needs clang-format, which the test extra brings")
ROOT = Path(__file__).parents[2]


def complaints(source, folder):
    """What clang-format would change, in its words."""
    path = folder / "kernel.cpp"
    path.write_text(source)
    program = clang_format.get_executable("clang-format")
    done = subprocess.run([program, f"--style=file:{ROOT}/.clang-format", "--dry-run", "--Werror", str(path)],
                          capture_output=True, text=True)
    return done.stderr[:2000] or "it fails" * (done.returncode != 0)


@pytest.mark.slow
@pytest.mark.parametrize("heads", [None, (16, 32)])
@pytest.mark.parametrize("schedule", ON_CORES)
def test_layout(schedule, heads, tmp_path):
    b = Build("pto", schedule=schedule, heads=heads)
    source = re.search(r"SOURCE = r'''\n(.*?)'''", render(b), re.S)[1]
    assert complaints(source, tmp_path) == ""
    assert source.isascii() and source.count("/**\n * @brief") == len(lowered(b).kernels)
    names = re.findall(r"PTO_ENTRY void (\w+)\(", source)
    counts = "_h16hv32" if heads else ""
    assert names == [f"gated_delta_rule{counts}_{k.name}_fp16" for k in lowered(b).kernels]


@pytest.mark.slow
@pytest.mark.parametrize("launch", ["kernels", "single"])
@pytest.mark.parametrize("schedule, options", [
    ("staged", dict(chunk=128, heads=(2, 6))), ("prepared", dict(layout="bhtd", dtype="bfloat16")),
    ("replay", dict(chunk=32, dtype="float32", head_dim_k=32, head_dim_v=32)),
    ("staged", dict(algorithm="simple_gla", chunk=128, layout="bhtd")), ("staged", dict(chunk=128, dtype="float32"))])
def test_other_builds(schedule, options, launch, tmp_path):
    text = render(Build("pto", schedule=replace(named(schedule), launch=launch), **options))
    source = re.search(r"SOURCE = r'''\n(.*?)'''", text, re.S)[1]
    assert complaints(source, tmp_path) == "" and source.isascii()
