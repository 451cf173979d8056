"""benchmarks/readme.py has the figures that README.md has, and commands that their programs take."""
import importlib.util
import sys
from pathlib import Path

import pytest

from gdn_codegen import cli_parser

ROOT = Path(__file__).parents[2]
spec = importlib.util.spec_from_file_location("benchmarks_readme", ROOT / "benchmarks" / "readme.py")
readme = importlib.util.module_from_spec(spec)
sys.modules[spec.name] = readme  # dataclasses look the module up
spec.loader.exec_module(readme)


@pytest.mark.parametrize("name", readme.FIGURES)
def test_the_figure_is_in_the_readme_and_its_commands_are_taken(name, tmp_path):
    assert (ROOT / "README.md").read_text().count(readme.FIGURES[name].says) == 1
    for words in readme.commands(name, tmp_path):
        assert words[0] == sys.executable
        if words[1:3] == ["-m", "gdn_codegen.cli"]:
            cli_parser.parser().parse_args(words[3:])
        elif words[1] != "-m":
            assert (ROOT / words[1]).is_file()


def test_what_failed_is_made_again_and_what_is_there_is_not(tmp_path, monkeypatch, capsys):
    second = "import pathlib; pathlib.Path('{out}/go').read_text(); print('second')"
    monkeypatch.setitem(readme.FIGURES, "one", readme.Figure("", (
        "{python} -c \"print('first')\"", f'{{python}} -c "{second}"')))
    monkeypatch.setattr(readme, "ROOT", tmp_path)
    assert readme.main([str(tmp_path), "one"]) == 1 and "one: failed, see" in capsys.readouterr().out
    assert "first" in (tmp_path / "one.txt").read_text() and "readme.py: exit status 1" in (tmp_path / "one.txt").read_text()
    (tmp_path / "go").write_text("")
    assert readme.main([str(tmp_path), "one"]) == 0
    text = (tmp_path / "one.txt").read_text()
    assert text.splitlines()[1::2] == ["first", "second"] and text.endswith("exit status 0\n")
    (tmp_path / "go").unlink()
    assert readme.main([str(tmp_path), "one"]) == 0 and (tmp_path / "one.txt").read_text() == text
    with pytest.raises(SystemExit):
        readme.main([str(tmp_path), "another"])
    assert "NAME: got 'another'; accepted: prefill, gradient" in capsys.readouterr().err
