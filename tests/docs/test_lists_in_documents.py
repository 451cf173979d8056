"""Lists in documents are those of the code, and the examples of docs/schedules.md build."""
import re
from pathlib import Path

import pytest

from gdn_codegen.ir import builder
from gdn_codegen.runtime.build import Build, lowered
from gdn_codegen.schedule.agents import ASSIGNMENTS
from gdn_codegen.tools.cache_command import known

DOCS = Path(__file__).parents[2] / "docs"


def test_kinds_of_the_cache():
    (text,) = re.findall(r"The kinds are (.*?)\.\s", (DOCS / "dispatch.md").read_text(), re.S)
    assert sorted(re.findall(r"`(\w+)`", text)) == sorted(known())


def test_functions_of_a_page():
    (text,) = re.findall(r"functions of `gdn_codegen.ir.builder`:\s+`(.*?)`", (DOCS / "your_own_algorithm.md").read_text(), re.S)
    takes_values = {n for n, f in vars(builder).items() if getattr(f, "__annotations__", {}).get("return") == "Value"}
    assert set(text.split()) == takes_values - {"apply"}


@pytest.mark.parametrize("name", re.findall(r'agents="(\w+)"', (DOCS / "schedules.md").read_text()))
def test_the_assignment_of_the_document_builds_at_the_default_sizes(name):
    blocks = re.findall(r"```python\n(.*?)```", (DOCS / "schedules.md").read_text(), re.S)
    (text,) = (x for x in blocks if f'agents="{name}"' in x)
    names = {}
    try:
        exec(text, names)
        p = lowered(Build("tilelang", arch="sm_90a", schedule=names["mine"]))
    finally:
        ASSIGNMENTS.pop(name, None)
    assert [a.name for k in p.kernels for a in k.agents] == ["compute", "mover"]
