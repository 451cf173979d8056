"""Trains a small hybrid language model (hybrid_model.py) on text that ships with Python.

    pip install 'gdn_codegen[triton,tilelang,bench]'
    python examples/train_lm.py --out run --op reference
    python examples/train_lm.py --out run --op reference64
    python examples/train_lm.py --out run --op gdn_codegen --target tilelang

The first command trains with a recurrence in plain torch and float32, the second with the same in float64, the third with this
package's op. The text is the language reference that `help()` shows, 0.5 MB; --text takes another file. The folder has the
losses (run/OP/losses.csv) and a plot of them (run/losses.png). The same command again goes on from the checkpoint,
run/OP/checkpoint.pt: it also resumes what was stopped, and the losses are those of a run that was not; on a GPU up to the
rounding of torch's attention and embedding, whose sums have no fixed order there. On a GPU the op multiplies float32 as TF32,
so its losses are further from the reference's. Ctrl-C ends after the step under way and keeps a checkpoint.
Exits with 0; 1 if a loss is not finite; 2 for bad arguments; 130 if stopped.
"""
from __future__ import annotations

import argparse
import csv
import hashlib
import io
import math
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path

import torch
from hybrid_model import Sizes
from lm_training import Options, Training, check_same, written

from gdn_codegen import targets
from gdn_codegen.tools.plots import pyplot

#: How the losses of each op are drawn: the references over ours.
OPS = {"gdn_codegen": {"label": "gdn_codegen", "linewidth": 4, "color": "#9ec5f4"},
       "reference": {"label": "recurrence in plain torch, float32", "linewidth": 1.2, "color": "#d1495b"},
       "reference64": {"label": "recurrence in plain torch, float64", "linewidth": 1, "color": "black", "linestyle": ":"}}
PATIENCE = 2.0  # seconds between lines of progress


def read_text(path: str | None) -> bytes:
    """The text of a file, or the language reference that `help()` shows."""
    if path is not None:
        try:
            return Path(path).read_bytes()
        except OSError as e:
            raise ValueError(f"text: got {path}: {e.strerror}; accepted: a file that can be read") from None
    try:
        from pydoc_data.topics import topics
    except ImportError:
        raise ValueError("text: this Python has no pydoc_data; accepted: --text FILE") from None
    return "\n".join(topics[name] for name in sorted(topics)).encode()


@contextmanager
def told_to_stop() -> Iterator[list[int]]:
    """Inside, the first SIGINT or SIGTERM is put in the list. The next one is a KeyboardInterrupt."""
    told: list[int] = []

    def tell(number: int, frame: object) -> None:
        if told:
            raise KeyboardInterrupt
        told.append(number)
        print("stops after this step; once more: at once, with the last checkpoint", file=sys.stderr, flush=True)

    before = {s: signal.signal(s, tell) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield told
    finally:
        for s, handler in before.items():
            signal.signal(s, handler)


def train(t: Training, steps: int, every: int, folder: Path) -> bool:
    """Trains until `steps` steps are done, with a checkpoint after `every` and at the end. False if it was told to stop."""
    start, first, last = time.perf_counter(), len(t.losses), 0.0
    with told_to_stop() as told:
        while len(t.losses) < steps and not told:
            loss, now = t.step(), time.perf_counter()
            done = len(t.losses)
            if done == first + 1:
                start = now  # the first step compiles
            elif now - last > PATIENCE or done == steps:
                pace, last = (now - start) / (done - first - 1), now
                minutes, seconds = divmod(round(pace * (steps - done)), 60)
                print(f"step {done}/{steps}  loss {loss:.3f}  {t.options.batch * t.options.length / pace:.0f} tokens/s  "
                      f"{minutes}:{seconds:02} left", file=sys.stderr, flush=True)
            if done % every == 0 or done == steps or told:
                t.save(folder)
        return not told


def draw(folder: Path, options: Options) -> None:
    """Draws the losses of the folder's ops, and how far they are from those of the last one, the most exact."""
    plt, found = pyplot(), {}
    for op in OPS:
        if (path := folder / op / "losses.csv").exists():
            found[op] = [float(row["loss"]) for row in csv.DictReader(path.read_text().splitlines())]
    figure, (ax, below) = plt.subplots(2, figsize=(9, 6.5), sharex=True, height_ratios=(3, 1))
    for op, losses in found.items():
        ax.plot(range(1, len(losses) + 1), losses, **OPS[op])
    ax.set(ylabel="loss, nats a byte", title=f"{options.layers} layers, dim {options.dim}, batch {options.batch} x "
           f"{options.length} bytes, {options.dtype}, seed {options.seed}")
    ax.legend()
    best = list(found)[-1]
    for op in list(found)[:-1]:
        apart = [abs(x - y) for x, y in zip(found[op], found[best], strict=False)]  # of the steps that both have
        below.plot(range(1, len(apart) + 1), apart, **OPS[op] | {"linewidth": 1})
        print(f"losses of {op} and {best} differ by {max(apart):.1e} at most, in {len(apart)} steps")
    below.set_yscale("symlog", linthresh=1e-6)  # the first steps may have no difference
    below.set(xlabel="step", ylabel=f"difference from\n{best}", ylim=(0, None))
    figure.tight_layout()
    data = io.BytesIO()
    figure.savefig(data, dpi=110, metadata={"Software": None})
    plt.close(figure)
    written(folder / "losses.png", data.getvalue())


def number(kind: Callable[[str], float], least: float) -> Callable[[str], float]:
    """A type of the command line: a finite number of at least `least`."""
    def read(text: str) -> float:
        try:
            if math.isfinite(x := kind(text)) and x >= least:
                return x
        except ValueError:
            pass
        raise argparse.ArgumentTypeError(f"got {text}; accepted: {'an integer' if kind is int else 'a number'} from {least}")
    return read


def parser() -> argparse.ArgumentParser:
    """The command line."""
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    p.add_argument("--out", required=True, help="folder for checkpoints, losses and the plot")
    p.add_argument("--op", choices=OPS, default="gdn_codegen", help="the package's op, or a recurrence in torch")
    p.add_argument("--target", choices=["auto", *targets.names()], default="auto", help="target of the package's op")
    p.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    p.add_argument("--steps", type=number(int, 1), default=300, help="steps in all, those before a checkpoint among them")
    p.add_argument("--save-every", type=number(int, 1), default=50, help="steps from one checkpoint to the next")
    p.add_argument("--text", help="a file to learn instead of Python's language reference")
    p.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32", help="bfloat16: torch's autocast")
    p.add_argument("--rate", type=number(float, 0), default=1e-3, help="learning rate")
    p.add_argument("--seed", type=number(int, 0), default=0, help="of parameters and batches")
    for name, value, said in (("batch", 8, "rows of a step"), ("length", 128, "bytes of a row"), ("layers", Sizes.layers, ""),
                              ("dim", Sizes.dim, "of the residual"), ("heads", Sizes.heads, "of keys; values have two to each"),
                              ("head-dim", Sizes.head_dim, "K and V")):
        p.add_argument(f"--{name}", type=number(int, 1), default=value, help=said)
    return p


def main(argv: list[str] | None = None) -> int:
    """Trains, or goes on. Returns the exit status."""
    p = parser()
    given = p.parse_args(argv)
    try:
        pyplot()  # says now if matplotlib is missing
        text, folder = read_text(given.text), Path(given.out)
        options = Options(**{f.name: getattr(given, f.name) for f in fields(Options) if f.name != "text"},
                          text=hashlib.sha256(text).hexdigest()[:16])
        t = Training(options, given.op, given.target, given.device, text)
        check_same(folder, options)
        t.resume(folder)
        whole = train(t, given.steps, given.save_every, folder)
        held_out = t.held_out_loss() if whole else None
        draw(folder, options)
    except (ValueError, OSError) as e:
        p.error(str(e))
    except ArithmeticError as e:
        print(e, file=sys.stderr)
        return 1
    how = f"held-out loss {held_out:.3f}" if whole else "stopped; the same command goes on"
    print(f"{given.op}: step {len(t.losses)}, {how}")
    return 0 if whole else 130


if __name__ == "__main__":
    sys.exit(main())
