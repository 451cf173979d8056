"""README.md: the quick start runs as it stands there, and .ci/run finds its test command."""
import re
import subprocess
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def quick_start():
    (text,) = re.findall(r"<!-- quick start -->\n```python\n(.*?)^```$", README, re.M | re.S)
    return text


@pytest.mark.slow
def test_the_quick_start_is_short_and_runs(capsys, monkeypatch):
    text = quick_start()
    assert len(text.splitlines()) <= 20
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    names = {}
    exec(text, names)
    assert capsys.readouterr().out == "torch.Size([1, 100, 2, 64]) torch.Size([1, 2, 64, 64])\ntorch.Size([1, 1, 2, 64])\n"
    assert all(torch.isfinite(names[n]).all() for n in ("o", "state", "o1"))


def test_the_op_comes_before_the_module():
    assert 0 < README.index("from gdn_codegen import") < README.index("from generated.")


def test_the_command_of_ci_is_found():
    line = next(x for x in (ROOT / ".ci" / "run").read_text().splitlines() if x.startswith("command="))
    script = f"{line}; printf '%s' \"$command\""
    done = subprocess.run(["bash", "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("pip install ") and "\n" not in done.stdout and "pytest" in done.stdout


def test_the_status_names_the_card_and_the_counts_of_the_last_run():
    """Those of docs/verification.md, which a program writes."""
    run = (ROOT / "docs" / "verification.md").read_text()
    (card,) = set(re.findall(r"NVIDIA (H\d+) ", re.search(r"^- commit .*$", run, re.M)[0]))
    calls, counts = re.search(r"(\d+) calls in \d+ s on \d+ processes: (.*)$", run, re.M).groups()
    (row,) = (x for x in README.splitlines() if "docs/verification.md" in x and x.startswith("| NVIDIA Hopper"))
    assert f"on one {card}, in {calls} calls" in row
    assert all(re.search(rf"\b{x}\b", row) for x in counts.split(", ") if x != "0 error"), counts


@pytest.mark.parametrize("picture", ["beside_peers.png", "graph_staged.svg"])
def test_pictures_are_shown(picture):
    assert re.search(rf"^!\[[^\]]{{20,}}\]\(docs/{re.escape(picture)}\)$", README, re.M)
