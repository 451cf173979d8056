"""What a program makes of docs/ is up to date, and says what its source says."""
import re
import shutil
import xml.etree.ElementTree as ET

import pytest

import gdn_codegen
from gdn_codegen.cli import main as cli
from gdn_codegen.runtime.build import Build, lowered
from gdn_codegen.tools import documents, graph, plots

COMMAND = "python -m gdn_codegen.tools.documents"
TABLE = """
| shape (H/HV) | FLA | FlashQLA | TileOps | FlashInfer | ours | note |
| --- | ---: | ---: | ---: | ---: | ---: | --- |
| 1 x 64, 1/1 | 4.000 | 2.000 | - | 1.500 | 0.500 | walk |
| 2 x 64, 1/2 | 8.000 | 4.000 | 3.000 | 1.000 | 0.250 | walk |

| shape (H/HV) | FLA | FlashQLA | TileOps | FlashInfer | ours |
| --- | ---: | ---: | ---: | ---: | ---: |
| later | 1.0 | 1.0 | 1.0 | 1.0 | 1.0 |
"""
READ = {"1 x 64, 1/1": {"FLA": 4.0, "FlashQLA": 2.0, "FlashInfer": 1.5, "ours": 0.5},
        "2 x 64, 1/2": {"FLA": 8.0, "FlashQLA": 4.0, "TileOps": 3.0, "FlashInfer": 1.0, "ours": 0.25}}


def test_what_is_made_is_up_to_date(capsys):
    assert documents.main(["--check"]) == 0, f"run: {COMMAND}\n{capsys.readouterr().out}"


def test_the_reference_has_each_public_name_once():
    page = (documents.ROOT / "docs" / "api.md").read_text()
    for name in gdn_codegen.__all__:
        assert page.count(f"### `{name}`\n") == 1
    assert "Callable" in page and " at 0x" not in page and "'Tensor'" not in page


def test_the_chart_has_the_figures_of_the_table():
    table = documents.figures((documents.ROOT / "docs" / "performance.md").read_text())
    assert len(table) == 10
    assert documents.chart_text((documents.ROOT / "docs" / "beside_peers.png").read_bytes()) == table


@pytest.mark.slow
def test_a_changed_figure_makes_the_chart_anew(tmp_path, monkeypatch, capsys):
    pytest.importorskip("matplotlib")
    shutil.copytree(documents.ROOT / "docs", tmp_path / "docs")
    monkeypatch.setattr(documents, "ROOT", tmp_path)
    page = tmp_path / "docs" / "performance.md"
    first = next(iter(documents.figures(page.read_text()).values()))["ours"]
    page.write_text(page.read_text().replace(f"| {first:.3f} |", "| 9.999 |", 1))
    (tmp_path / "docs" / "graph_fused.svg").write_text("<svg/>")
    assert documents.main(["--check"]) == 1
    said = capsys.readouterr().out
    assert "beside_peers.png: out of date" in said and "graph_fused.svg: out of date" in said
    assert "graph_staged.svg: up to date" in said
    assert documents.main([]) == 0 and documents.main(["--check"]) == 0
    drawn = documents.chart_text((tmp_path / "docs" / "beside_peers.png").read_bytes())
    assert next(iter(drawn.values()))["ours"] == 9.999
    assert documents.main(["--chek"]) == 2


def test_the_first_table_is_read():
    assert documents.figures(TABLE) == READ


@pytest.mark.parametrize(("text", "said"), [
    ("| shape | FLA | ours |\n| --- | --- | --- |\n", "no table"), (TABLE.replace("1.500", "fast"), "'fast' at 1 x 64, 1/1")])
def test_a_table_that_cannot_be_read_is_refused(text, said):
    with pytest.raises(ValueError, match=f"got {said}"):
        documents.figures(text)


def test_bars_are_as_long_as_times_over_ours(tmp_path, monkeypatch):
    pyplot = plots.pyplot()
    monkeypatch.setattr(pyplot, "close", lambda figure: None)
    path = plots.beside_peers(READ, tmp_path / "chart.png", {"figures": "{}"})
    (ax,) = pyplot.gcf().axes
    bars = {c.get_label(): [b.get_width() for b in c] for c in ax.containers if hasattr(c, "patches")}
    assert bars == {"FLA": [8, 32], "FlashQLA": [4, 16], "FlashInfer": [3, 4], "ours": [1, 1], "TileOps": [12]}
    assert documents.chart_text(path.read_bytes()) == {}


def test_a_picture_of_another_program_is_refused(tmp_path):
    figure = plots.pyplot().figure()
    figure.savefig(tmp_path / "other.png")
    with pytest.raises(ValueError, match="without figures"):
        documents.chart_text((tmp_path / "other.png").read_bytes())


def test_the_graph_is_that_of_the_kernels():
    first, second = graph.boxes(Build("triton", schedule="replay"))
    assert (first.grid, second.grid) == ("parallel over chunks", "one chunk after another")
    assert {n: x.kind for n, x in first.nodes.items()} == {
        "g": "input", "k": "input", "beta": "input", "G": "written", "D": "computed", "A": "computed", "Tinv": "written"}
    assert set(first.edges) == {("g", "G"), ("G", "D"), ("k", "A"), ("beta", "A"), ("D", "A"), ("A", "Tinv")}
    state = {n: x for n, x in second.nodes.items() if x.name == "S"}
    assert {x.kind for x in state.values()} == {"state", "output"} and len(state) == 2
    assert second.nodes["Tinv"] == graph.Node("Tinv", "read", "of kernel 1")
    assert {"q", "k", "v", "G", "Tinv", "beta"} <= second.nodes.keys()
    assert {("D", "o"), ("U", "o"), ("q", "o"), ("k", "o"), ("S", "o")} <= set(second.edges)


@pytest.mark.parametrize("schedule", ["staged", "walk", "fused_walk"])
def test_pictures_have_every_value_and_edge_once(schedule, capsys):
    b = Build("triton", schedule=schedule)
    boxes = graph.boxes(b)
    assert [x.name for x in boxes] == [f"kernel {k.name}" for k in lowered(b).kernels]
    assert cli(["show", "--target", "triton", "--chunk", "64", "--schedule", schedule, "--graph"]) == 0
    dot = capsys.readouterr().out
    assert dot.count("->") == sum(len(x.edges) for x in boxes) and dot.count("label=") == sum(len(x.nodes) + 1 for x in boxes)
    assert cli(["show", "--target", "triton", "--chunk", "64", "--schedule", schedule, "--graph", "svg"]) == 0
    root = ET.fromstring(capsys.readouterr().out)
    kernels = root.findall("{*}g")
    assert len(kernels) == len(boxes)
    for box, drawn in zip(boxes, kernels, strict=True):
        assert len(drawn.findall("{*}path")) == len(box.edges)
        frame, *nodes = drawn.findall("{*}rect")
        places = {(float(r.get("x")), float(r.get("y"))) for r in nodes}
        assert len(places) == len(box.nodes)  # none over another
        for r in nodes:
            assert 0 <= float(r.get("x")) <= float(frame.get("width")) - float(r.get("width"))
            assert 0 <= float(r.get("y")) <= float(frame.get("height")) - float(r.get("height"))
        for path in drawn.findall("{*}path"):  # from left to right, so that no arrow points back
            xs = [float(x) for x in re.findall(r"[MC ](-?\d+) -?\d+", path.get("d"))]
            assert xs == sorted(xs)
