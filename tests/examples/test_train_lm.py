"""examples/train_lm.py: the op's losses are those of a plain recurrence, and a stopped run goes on as if it had not."""
import csv
import os
import signal
import sys
from importlib import import_module
from pathlib import Path

import pytest

from gdn_codegen.runtime.targets import runs

pytest.importorskip("matplotlib")

#: A model that takes milliseconds a step, with chunks that are whole, ragged or both.
SIZES = ("--dim", "16", "--heads", "1", "--head-dim", "16", "--batch", "2", "--length", "80", "--device", "cpu")
TINY = ("--dim", "8", "--heads", "1", "--head-dim", "4", "--batch", "2", "--length", "12", "--device", "cpu")
TOLERANCE = 1e-4  # nats, after five steps in float32


@pytest.fixture(scope="module")
def example():
    """The modules of the example, by name."""
    sys.path.insert(0, folder := str(Path(__file__).parents[2] / "examples"))
    yield {name: import_module(name) for name in ("train_lm", "lm_training", "hybrid_model")}
    sys.path.remove(folder)


@pytest.fixture
def run(example, monkeypatch):
    """Calls the command line; returns its status and the losses of the op. Plots take longer than steps: few tests draw."""
    own = example["train_lm"].draw

    def run(out, *args, op="reference", sizes=TINY, draw=False):
        monkeypatch.setattr(example["train_lm"], "draw", own if draw else lambda *_: None)
        status = example["train_lm"].main(["--out", str(out), "--op", op, *sizes, *args])
        with open(out / op / "losses.csv") as f:
            rows = list(csv.DictReader(f))
        assert [int(r["step"]) for r in rows] == list(range(1, len(rows) + 1))
        return status, [float(r["loss"]) for r in rows]
    return run


def apart(x, y):
    assert len(x) == len(y)
    return max(abs(a - b) for a, b in zip(x, y, strict=True))


@pytest.mark.slow
@pytest.mark.skipif(not runs("tilelang", "cpu"), reason="needs TileLang on the CPU")
def test_losses_are_those_of_the_recurrence(run, tmp_path, capsys):
    code, want = run(tmp_path, "--steps", "5", "--rate", "0.02", sizes=SIZES)
    for steps in "25":  # the second goes on
        status, got = run(tmp_path, "--steps", steps, "--rate", "0.02", "--target", "tilelang", op="gdn_codegen", sizes=SIZES)
    assert code == status == 0 and apart(got, want) < TOLERANCE
    held_out = [float(line.split()[-1]) for line in capsys.readouterr().out.splitlines()]
    assert held_out[0] == pytest.approx(held_out[2], abs=1e-3) and held_out[0] != pytest.approx(held_out[1], abs=1e-3)


def test_the_plot_has_what_the_folder_has(example, run, tmp_path, monkeypatch, capsys):
    run(tmp_path, "--steps", "3", draw=True)
    alone = (tmp_path / "losses.png").read_bytes()
    monkeypatch.setattr(example["lm_training"], "generated", lambda target: example["hybrid_model"].reference)
    run(tmp_path, "--steps", "2", op="gdn_codegen", draw=True)
    both = (tmp_path / "losses.png").read_bytes()
    assert alone != both and alone[:4] == both[:4] == b"\x89PNG"
    assert "losses of gdn_codegen and reference differ by 0.0e+00 at most, in 2 steps" in capsys.readouterr().out


@pytest.mark.parametrize("lost", [pytest.param(i, marks=pytest.mark.slow) if i else i for i in range(7)])
def test_an_op_without_one_gradient_is_seen(example, run, tmp_path, monkeypatch, lost):
    """The tolerance of the test above tells. lost: the place of an argument of the op."""
    own, steps = example["hybrid_model"].reference, ("--steps", "5", "--rate", "0.02")
    _, want = run(tmp_path, *steps)
    broken = lambda *args: own(*args[:lost], args[lost].detach(), *args[lost + 1:])
    monkeypatch.setattr(example["lm_training"], "generated", lambda target: broken)
    _, got = run(tmp_path, *steps, op="gdn_codegen")
    assert got[0] == want[0] and apart(got, want) > 2 * TOLERANCE


def test_the_loss_falls(run, tmp_path):
    (tmp_path / "text").write_text("abcd" * 200)
    _, losses = run(tmp_path / "out", "--steps", "40", "--rate", "0.05", "--text", str(tmp_path / "text"))
    assert losses[0] > 5 and losses[-1] < 0.5


def test_the_recurrence_in_float64_differs_by_rounding(run, tmp_path):
    x, y = (run(tmp_path, "--steps", "5", "--rate", "0.02", op=op)[1] for op in ("reference", "reference64"))
    assert 0 < apart(x, y) < TOLERANCE / 10


def test_bfloat16_rounds(run, tmp_path):
    x, y = (run(tmp_path / dtype, "--steps", "5", "--dtype", dtype)[1] for dtype in ("float32", "bfloat16"))
    assert TOLERANCE / 10 < apart(x, y) < 0.05


def test_autocast_does_not_round_the_recurrence(example):
    """Its operands are those that it was given; only the result has their dtype."""
    import torch
    gen = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 9, h, 8, generator=gen).bfloat16() for h in (1, 1, 2))
    a, b, A_log, dt_bias = (torch.randn(s, generator=gen) for s in ((1, 9, 2), (1, 9, 2), (2,), (2,)))
    for dtype in (torch.float32, torch.float64):
        op = example["hybrid_model"].reference
        want = op(q, k, v, a, b, A_log, dt_bias, dtype)
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(op(q, k, v, a, b, A_log, dt_bias, dtype), want)


def test_a_seed_changes_losses_and_a_run_again_does_not(run, tmp_path):
    x, y, z = (run(tmp_path / str(i), "--steps", "3", "--seed", seed)[1] for i, seed in enumerate("001"))
    assert x == y and x[0] != z[0]


def test_a_resumed_run_has_the_losses_of_a_whole_one(run, tmp_path):
    _, want = run(tmp_path / "whole", "--steps", "9")
    for steps in (2, 5, 9, 9, 3):  # the last two have nothing left to do
        _, got = run(tmp_path / "parts", "--steps", str(steps), "--save-every", "4")
        assert got == want[:max(steps, len(got))]
    assert got == want


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_after_the_step_and_keeps_a_checkpoint(example, run, tmp_path, capsys, number):
    _, want = run(tmp_path / "whole", "--steps", "6")
    step, before = example["lm_training"].Training.step, signal.getsignal(number)

    def stopped(self):
        if len(self.losses) == 2:
            os.kill(os.getpid(), number)
        return step(self)

    with pytest.MonkeyPatch.context() as m:
        m.setattr(example["lm_training"].Training, "step", stopped)
        assert run(tmp_path / "stopped", "--steps", "6") == (130, want[:3])
    assert "stopped; the same command goes on" in capsys.readouterr().out and signal.getsignal(number) == before
    assert run(tmp_path / "stopped", "--steps", "6") == (0, want)


def test_a_second_signal_ends_at_once_and_leaves_the_last_checkpoint(example, run, tmp_path):
    _, want = run(tmp_path, "--steps", "2")
    with pytest.MonkeyPatch.context() as m, pytest.raises(KeyboardInterrupt):
        m.setattr(example["lm_training"].Training, "step", lambda self: [os.kill(os.getpid(), signal.SIGINT) for _ in "12"])
        run(tmp_path, "--steps", "5")
    assert run(tmp_path, "--steps", "2") == (0, want)


def test_a_loss_that_is_not_finite_is_said_and_not_kept(run, tmp_path, capsys):
    _, want = run(tmp_path, "--steps", "2", "--rate", "1e30")
    assert run(tmp_path, "--steps", "9", "--rate", "1e30") == (1, want)
    assert "the loss is nan" in capsys.readouterr().err


def test_a_file_is_written_whole_or_not_at_all(example, tmp_path, monkeypatch):
    written, path = example["lm_training"].written, tmp_path / "a" / "x"
    written(path, b"old")
    monkeypatch.setattr(os, "replace", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        written(path, b"new")
    assert path.read_bytes() == b"old" and list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize(("args", "said"), [
    (("--steps", "0"), "--steps: got 0; accepted: an integer from 1"),
    (("--rate", "nan"), "--rate: got nan; accepted: a number from 0"),
    (("--layers", "6"), "layers: got 6; accepted: a multiple of 4"),
    (("--head-dim", "3"), "head_dim: got 3; accepted: an even number"),
    (("--length", "90000"), "length: got 90000; accepted: less than"),
    (("--text", "/absent"), "text: got /absent: No such file"),
    (("--batch", "3"), "batch: got 3, but"),
    (("--op", "other"), "invalid choice: 'other'")])
def test_bad_arguments_are_named(run, tmp_path, capsys, args, said):
    run(tmp_path, "--steps", "1")
    with pytest.raises(SystemExit) as e:
        run(tmp_path, *args)
    assert e.value.code == 2 and said in capsys.readouterr().err


def test_a_broken_checkpoint_is_named(run, tmp_path, capsys):
    run(tmp_path, "--steps", "1")
    (path := tmp_path / "reference" / "checkpoint.pt").write_bytes(b"nothing")
    with pytest.raises(SystemExit):
        run(tmp_path)
    assert f"{path} is no checkpoint" in capsys.readouterr().err
