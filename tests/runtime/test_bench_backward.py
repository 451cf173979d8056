"""`bench --backward`: what is run and what is printed. Times come from stand-ins, as there is no GPU."""
from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from gdn_codegen.algorithms import find
from gdn_codegen.cli import main
from gdn_codegen.tools import bench_backward
from gdn_codegen.tools.bench_calls import Auto, directions
from gdn_codegen.tools.bench_table import kept
from gdn_codegen.tools.layer_inputs import as_layers_pass, as_the_page_reads
from gdn_codegen.tools.peer_ops import OPS
from gdn_codegen.tools.peers import OF_GDN, Absent, Peer, Refused
from gdn_codegen.tools.problems import problem
from gdn_codegen.tools.shapes import Shape
from gdn_codegen.tools.verify import rms_error

SMALL = Shape("small", (20, 5), 1, 2)


def small(page="simple_gla"):
    return problem(SMALL, "float16", 16, 16, device="cpu", algorithm=find(page))


def test_a_run_is_the_gradient_by_all_inputs():
    """Of a loss that is a random weighted sum of the outputs; the same run after run."""
    x = small()
    forward, run, _ = directions(Auto(OPS["simple_gla"], "triton", 16).prepare, x)
    found, again = run(), run()
    assert forward()[0].requires_grad
    assert [d.shape for d in found] == [t.shape for t in x.inputs.values()]
    assert all(torch.equal(d, e) and d.any() for d, e in zip(found, again, strict=True))
    assert not any(t.requires_grad for t in x.inputs.values())


def test_a_call_without_a_gradient_is_refused():
    with pytest.raises(Refused, match="this call gives none"):
        directions(lambda x: lambda: (x.inputs["v"].detach().clone(),), small())


@pytest.fixture
def timed(monkeypatch):
    """A GPU of stand-ins: every call takes 2 ms on the device, in one kernel."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for name in ("synchronize", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    monkeypatch.setattr(bench_backward, "facts", lambda command, options: {"gpu": "a GPU", "command": command, **options})
    monkeypatch.setattr(bench_backward, "device_time", lambda run, n: (2.0, {"d_S_kernel": 2.0}))
    monkeypatch.setattr(bench_backward, "wall_time", lambda run, n: 3.0)
    monkeypatch.setattr(bench_backward, "compile_first", lambda *a: None)
    monkeypatch.setattr(bench_backward, "problem", lambda s, *about, algorithm: small(algorithm.name))


def test_rows_of_ours_and_of_peers(timed, tmp_path, capsys):
    """A peer that is not installed is listed as absent, one that fails is an error of its own, and ours fails the command."""
    def absent(x, check):
        raise Absent("other is absent")
    other = Peer("fla", "torch", ("torch",), {}, absent, head_dims=(16,))
    ours = Auto(OPS["simple_gla"], "triton", 16)
    about = {"page": find("simple_gla"), "json_to": str(tmp_path / "x.json"), "runs": 1, "detail": True}
    assert bench_backward.bench([ours], [SMALL], [other], **about) == 0
    out = capsys.readouterr().out
    assert "fla                  other is absent" in out and "triton auto              2.0000    3.0000" in out
    assert "d_S_kernel             2.0000" in out and "forward inference" in out
    first, second = json.loads((tmp_path / "x.json").read_text())["rows"]
    assert first["absent"] == "other is absent" and second["device_ms"] == 2.0 and second["shape"] == "small"
    assert bench_backward.bench([replace(ours, target="nowhere")], [SMALL], [], **about) == 1
    assert "nowhere auto" in capsys.readouterr().out


def test_errors_of_ours_and_of_peers(timed, capsys):
    """Each gradient beside torch.autograd through the page in float64. A wrong peer has large errors, and that is no error of the
    command; wrong gradients of ours are."""
    ours = Auto(OPS["simple_gla"], "triton", 16)

    def twice(x, check):
        run = ours.prepare(x)
        return lambda: (2 * run()[0],)
    other, about = Peer("fla", "torch", ("torch",), {}, twice, head_dims=(16,)), {"page": find("simple_gla"), "seeds": 1}
    assert bench_backward.bench([ours], [SMALL], [other], **about) == 0
    names, theirs, mine = (line.split()[-4:] for line in capsys.readouterr().out.splitlines()[-3:])
    assert names == ["d_q", "d_k", "d_v", "d_g"]
    assert all(float(e) < 5e-3 for e in mine) and all(.9 < float(e) < 1.1 for e in theirs)


def test_options_that_mean_nothing_beside_it(capsys):
    for words, said in ((["--schedule", "fused"], "schedule: got 'fused' with --backward"), ([], "torch sees none"),
                        (["--plot", "x.png"], "plot: got 'x.png'"),
                        (["--errors", "1", "--interpret"], "interpret: got True with --backward")):
        assert main(["bench", "--backward", "--target", "triton", *words]) == 2
        assert said in capsys.readouterr().err


@pytest.mark.parametrize("page", ["gated_delta_rule", "kimi_delta_attention"])
def test_inputs_of_a_layer(page):
    """They are those of the page but for rounding; our op takes them, and its gradients are those through the forms."""
    x = small(page)
    layer = as_layers_pass(x)
    assert not torch.equal(as_layers_pass(x, 1).inputs["dt_bias"], layer.inputs["dt_bias"])
    again = as_the_page_reads(replace(layer, inputs={n: t.double() for n, t in layer.inputs.items()}))
    assert all(rms_error(again.inputs[n], t.double()) < 1e-2 for n, t in x.inputs.items())
    assert {n: t.dtype for n, t in layer.inputs.items()} == {
        **dict.fromkeys(x.inputs, torch.float16), "A_log": torch.float32, "dt_bias": torch.float32}
    figures = bench_backward.compared(Auto(OPS[page], "triton", 16).prepare, [layer], 2e-2)
    assert set(figures["errors"]) == {*layer.inputs} and "error" not in figures


def test_peers_that_take_inputs_of_the_page_alone_refuse_those_of_a_layer():
    layer = as_layers_pass(small("gated_delta_rule"))
    flashqla = next(p for p in OF_GDN if p.name == "flashqla")
    assert "layer_inputs: got inputs of a layer; flashqla" in replace(flashqla, head_dims=(16,)).refusal(layer)
    assert "layer_inputs" not in OPS["gated_delta_rule"].as_peer().refusal(layer)


def test_layer_inputs_of_a_page_without_them_and_of_a_forward_pass(timed, capsys):
    with pytest.raises(ValueError, match="layer_inputs: got it for simple_gla; accepted: gated_delta_rule, kimi_delta_attention"):
        bench_backward.bench([Auto(OPS["simple_gla"], "triton", 16)], [SMALL], [], page=find("simple_gla"), layer=True)
    with pytest.raises(ValueError, match="layer_inputs: got it with --gates alike"):
        bench_backward.bench([], [SMALL], [], page=find("gated_delta_rule"), gates="alike", layer=True)
    assert main(["bench", "--layer-inputs"]) == 2
    assert "layer_inputs: got it without --backward" in capsys.readouterr().err


def test_a_row_is_written_before_the_next_one_begins(tmp_path):
    """So a run that is stopped keeps what it measured."""
    data, to = {"facts": {}, "rows": []}, tmp_path / "x.json"

    def rows():
        yield {"who": "first"}
        assert json.loads(to.read_text())["rows"] == [{"who": "first"}]
        yield {"who": "second"}
    assert kept(rows(), data, str(to)) == data["rows"] == json.loads(to.read_text())["rows"]
    assert kept(iter([{"who": "third"}]), data, None) == [{"who": "third"}] and len(data["rows"]) == 3
