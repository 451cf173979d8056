"""A training run of hybrid_model.py that can stop and go on, for train_lm.py."""
from __future__ import annotations

import csv
import io
import json
import math
import os
import tempfile
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from hybrid_model import Model, Sizes, generated, reference

#: Recurrences in plain torch, by the names of the command line.
REFERENCES = {"reference": reference, "reference64": partial(reference, dtype=torch.float64)}
WARM = 20  # steps in which the rate grows
HELD_OUT = 0.05  # of the text


@dataclass(frozen=True)
class Options:
    """What two losses must have in common to be compared: options of the command line, and a digest of the text."""

    seed: int
    batch: int
    length: int
    rate: float
    dtype: str
    layers: int
    dim: int
    heads: int
    head_dim: int
    text: str

    @property
    def sizes(self) -> Sizes:
        return Sizes(self.layers, self.dim, self.heads, self.head_dim)


def written(path: Path, data: bytes) -> None:
    """Writes a file whole: under another name first, which is then renamed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as f:
        try:
            f.write(data)
            f.flush()
            os.fsync(f.fileno())
            os.chmod(f.name, 0o644)
            os.replace(f.name, path)
        except BaseException:
            Path(f.name).unlink(missing_ok=True)
            raise


def check_same(folder: Path, options: Options) -> None:
    """ValueError if the folder was begun with other options."""
    if (path := folder / "options.json").exists():
        begun = json.loads(path.read_text())
        for name, new in asdict(options).items():
            if (old := begun.get(name)) != new:
                raise ValueError(f"{name}: got {new}, but {folder} was begun with {old}; accepted: {old}, or another --out")


class Training:
    """A model, its optimizer, and where it is in the text. Batches are drawn at random places, by a generator of its own."""

    def __init__(self, options: Options, op: str, target: str, device: str, text: bytes):
        """op: "gdn_codegen" or one of REFERENCES. ValueError for a text that is too short, cuda without a GPU, and sizes."""
        tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
        apart = int(HELD_OUT * len(tokens))
        if apart < options.length + 1:
            raise ValueError(f"length: got {options.length}; accepted: less than {apart}, the part of the text that is held out")
        if device == "cuda" and not torch.cuda.is_available():
            raise ValueError("device: got cuda; accepted: cpu, as torch finds no GPU")
        torch.manual_seed(options.seed)
        self.text, self.held_out = tokens[:-apart], tokens[-apart:]
        self.options, self.op, self.device = options, op, device
        self.model = Model(options.sizes, generated(target) if op == "gdn_codegen" else REFERENCES[op]).to(device)
        self.draws, self.losses = torch.Generator().manual_seed(options.seed), []
        matrices = [p for p in self.model.parameters() if p.ndim > 1]  # the rest, gates among it, does not decay
        self.optimizer = torch.optim.AdamW([{"params": matrices, "weight_decay": 0.1},
                                            {"params": [p for p in self.model.parameters() if p.ndim < 2], "weight_decay": 0.0}],
                                           lr=options.rate, betas=(0.9, 0.95))

    def batch(self, text: torch.Tensor, draws: torch.Generator) -> torch.Tensor:
        """Rows of the text [batch, length + 1], on the device."""
        at = torch.randint(len(text) - self.options.length, (self.options.batch, 1), generator=draws)
        return text[at + torch.arange(self.options.length + 1)].to(self.device)

    def loss(self, rows: torch.Tensor) -> torch.Tensor:
        """The mean cross entropy of each byte after those before, in nats."""
        with torch.autocast(self.device, torch.bfloat16) if self.options.dtype == "bfloat16" else nullcontext():
            logits = self.model(rows[:, :-1])
        return F.cross_entropy(logits.float().flatten(0, 1), rows[:, 1:].flatten())

    def step(self) -> float:
        """One step of AdamW; the loss before it. ArithmeticError if that is not finite."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.options.rate * min(1.0, (len(self.losses) + 1) / WARM)
        loss = self.loss(self.batch(self.text, self.draws))
        if not math.isfinite(value := loss.item()):
            raise ArithmeticError(f"step {len(self.losses) + 1}: the loss is {value}")
        self.optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.losses.append(value)
        return value

    @torch.no_grad()
    def held_out_loss(self, batches: int = 8) -> float:
        """The mean loss on text that no step has seen, the same rows each time."""
        draws = torch.Generator().manual_seed(0)
        return sum(self.loss(self.batch(self.held_out, draws)).item() for _ in range(batches)) / batches

    def save(self, folder: Path) -> None:
        """Writes the checkpoint, the losses and the options."""
        data, rows = io.BytesIO(), io.StringIO()
        torch.save({"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), "draws": self.draws.get_state(),
                    "losses": self.losses}, data)
        csv.writer(rows).writerows([("step", "loss"), *enumerate(self.losses, 1)])
        written(folder / self.op / "checkpoint.pt", data.getvalue())
        written(folder / self.op / "losses.csv", rows.getvalue().encode())
        written(folder / "options.json", json.dumps(asdict(self.options), indent=1).encode())

    def resume(self, folder: Path) -> None:
        """Goes on where the folder's checkpoint is, if it has one. ValueError if that cannot be read."""
        path = folder / self.op / "checkpoint.pt"
        if not path.exists():
            return
        try:
            kept = torch.load(path, map_location="cpu", weights_only=True)
            self.model.load_state_dict(kept["model"])
            self.optimizer.load_state_dict(kept["optimizer"])
            self.draws.set_state(kept["draws"])
            self.losses = kept["losses"]
        except Exception as e:  # torch.load has no class of its own for a file that is none
            raise ValueError(f"out: {path} is no checkpoint of this model ({type(e).__name__}); remove it to start anew") from e
