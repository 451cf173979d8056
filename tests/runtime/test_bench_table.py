"""The table and the plots of `bench`, of rows as a run writes them."""
import pytest

from gdn_codegen.tools import plots
from gdn_codegen.tools.bench_table import table


@pytest.fixture
def recorded():
    """Rows as a run writes them: two lengths, a peer, ours with two kernels, and rows without figures."""
    def done(shape, T, who, ms, kernels, **rest):
        return {"shape": shape, "lens": [T], "H": 16, "HV": 16, "who": who, "version": "1", "note": "", "device_ms": ms,
                "wall_ms": ms * 1.05, "host_us": 20.0, "launch_us": 5.5, "first_call_s": 1.0, "error_o": 3e-4,
                "error_state": 2e-4, "kernels": kernels, **rest}
    def mine(ms, scale):
        return [{"name": "G_Tinv", "ms": ms * 0.25, "bytes": 10**8 * scale, "asked": 10**8 * scale, "flops": 10**10 * scale,
                 "share": 0.5}, {"name": "o_S", "ms": ms * 0.75, "bytes": 5 * 10**8 * scale, "asked": 10**9 * scale,
                                 "flops": 8 * 10**10 * scale, "share": 0.4}]
    rows = [done("32K", 32768, "fla", 1.287, [{"name": f"k{i}", "ms": 1.287 / 9} for i in range(9)]),
            {**done("32K", 32768, "tileops", 0, []), "refused": "heads: got 4/16"},
            done("32K", 32768, "tilelang replay c64", 0.4, mine(0.4, 1), graph_ms=0.41),
            done("64K", 65536, "fla", 2.566, [{"name": "k", "ms": 2.566}]),
            done("64K", 65536, "tilelang replay c64", 0.8, mine(0.8, 2), error="off by 1.0e+00")]
    for n in ("device_ms", "wall_ms", "host_us", "launch_us", "kernels"):
        del rows[1][n]
    return {"facts": {"gpu": "a GPU"}, "ceilings": {"bytes": 4e12, "flops": 8e14}, "rows": rows}


def test_table(recorded):
    lines = table(recorded)
    text = "\n".join(lines)
    line = next(x for x in lines if "tilelang replay" in x).split()
    assert line[3:11] == ["0.4000", "0.4200", "0.4100", "20.0", "5.5", "3.0e-04", "2.0e-04", "3.22"]
    assert next(x for x in lines if x.startswith("  fla")).split()[1:5] == ["1.2870", "1.3514", "-", "20.0"]
    assert "tileops              heads: got 4/16" in text and "off by 1.0e+00" in text
    assert "1.00 TB/s, 100 TFLOP/s, 50% of the roofline" in text and "1.67 TB/s, 267 TFLOP/s, 40% of the roofline" in text
    assert "k3" not in text and "k3" in "\n".join(table(recorded, detail=True))


def test_plots_show_the_recorded_numbers(recorded, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    drawn, save = {}, plots._save
    monkeypatch.setattr(plots, "_save", lambda plt, figure, path: drawn.update({path.stem: figure}) or save(plt, figure, path))
    paths = plots.gpu_plots(recorded, tmp_path / "run.png")
    assert [p.name for p in paths] == ["run_time.png", "run_roofline.png", "run_kernels.png"]
    assert all(p.read_bytes().startswith(b"\x89PNG") for p in paths)
    (ax,) = drawn["run_time"].axes
    lines = {x.get_label(): (list(x.get_xdata()), list(x.get_ydata())) for x in ax.lines}
    assert lines["fla"] == ([32768, 65536], [1.287, 2.566]) and lines["tilelang replay c64"][1] == [0.4, 0.8]
    (ax,) = drawn["run_roofline"].axes
    points = {x.get_label(): (list(x.get_xdata()), list(x.get_ydata())) for x in ax.lines[:2]}
    assert points["tilelang replay c64: G_Tinv"][0] == [100.0, 100.0]
    assert points["tilelang replay c64: G_Tinv"][1] == pytest.approx([100.0, 100.0])
    roof = ax.lines[-1]
    assert max(roof.get_ydata()) == 800 and list(roof.get_xdata())[1] == 200
    (ax,) = drawn["run_kernels"].axes
    widths = {y: [p.get_width() for p in ax.patches if abs(p.get_y() + p.get_height() / 2 - y) < 1e-6] for y in range(4)}
    assert len(widths[0]) == 7 and sum(widths[0]) == pytest.approx(1.287)  # six kernels and the others
    assert widths[1] == pytest.approx([0.3, 0.1]) and widths[3] == pytest.approx([0.6, 0.2])


def test_nothing_measured_nothing_drawn(recorded, tmp_path):
    recorded["rows"] = [recorded["rows"][1]]
    assert plots.gpu_plots(recorded, tmp_path / "run.png") == []
