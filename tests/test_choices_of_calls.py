"""The comparison of what calls get at two commits: it draws all kinds of calls, and sees a change of the model."""
import json
from pathlib import Path

from choices_of_calls import AXES, COUNT, calls, chosen, main
from devices import change

from gdn_codegen.runtime.call.device import Facts
from gdn_codegen.runtime.call.tables import Extent
from gdn_codegen.targets import find

CALL = "triton", Facts("cuda", ("a GPU",), "sm_90a", 132), Extent(16, 16, 1, 8192), (128, 128), AXES[4][0], None, "", "1"


def test_calls_are_the_same_on_each_run_and_of_all_kinds():
    drawn = calls()
    assert len(drawn) == COUNT and list(drawn) == list(calls())
    for axis, values in zip(zip(*drawn.values(), strict=True), AXES, strict=True):
        assert set(axis) == set(values)


def test_a_changed_model_is_seen(monkeypatch, tmp_path, capsys):
    """By the choice, and where the first of the model stays, by its list."""
    files = [str(tmp_path / n) for n in ("before.json", "after.json")]
    model, before = find("triton").model, chosen(*CALL)
    assert "chosen by model" in before["choice"] and chosen(*CALL) == before and not before["table"]
    for changed in (lambda x: list(model(x))[1:], lambda x: list(model(x))[:1]):
        with monkeypatch.context() as patch:
            change(patch, "triton", model=changed)
            after = chosen(*CALL)
        assert after["model"] != before["model"]
        for file, found in zip(files, (before, after), strict=True):
            Path(file).write_text(json.dumps({"a call": found}))
        assert main(files) == 1 and "1 calls, 1 differ" in capsys.readouterr().out
        assert main(files[:1] * 2) == 0 and "1 calls, 0 differ" in capsys.readouterr().out
