"""Every wait of a kernel without a wait too many is needed: leave one out, and the simulator stops the run."""
from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from gdn_codegen import pto_sim
from gdn_codegen.pto_sim import INPUT, OUTPUT, WORKSPACE, PtoSimError, launch

SOURCE = (Path(__file__).parent / "good.cpp").read_text()


def mutants() -> tuple[str, list[str]]:
    """`handshake` with one more argument, the wait to leave out, and what each number leaves out.

    A FLAG or a barrier is one wait; the sets and waits of EVENT_ID1 between two pipes, or the two ends of a cross-core
    flag, go together.
    """
    start = SOURCE.index("PTO_ENTRY void handshake")
    end = SOURCE.index("\n}\n", start)
    body = SOURCE[start:end].replace("int64_t n,", "int64_t n, int64_t without,")
    names: list[str] = []
    lines = []
    for number, line in enumerate(body.splitlines()):
        code = line.strip()
        pipes = re.match(r"(?:set|wait)_flag\((\w+), (\w+), EVENT_ID1\)", code)
        cross = re.match(r"ffts_cross_core_sync\(.*\((\d+) << 8\)\)|wait_flag_dev\((\d+)\)", code)
        if pipes:
            name = f"{pipes[1]} to {pipes[2]}, EVENT_ID1"
        elif cross:
            name = f"cross-core flag {cross[1] or cross[2]}"
        elif code.startswith(("FLAG(", "pipe_barrier(")):
            name = f"{code} in line {number}"
        else:
            lines.append(line)
            continue
        if name not in names:
            names.append(name)
        lines.append(f"if (without != {names.index(name)}) {{ {code} }}")
    return SOURCE[:start] + "\n".join(lines) + SOURCE[end:], names


TEXT, NAMES = mutants()


@pytest.fixture(scope="module")
def lib(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mutants")
    source = folder / "mutants.cpp"
    source.write_text(TEXT)
    return pto_sim.load(pto_sim.build(source, ["handshake"], folder / "mutants.so"))


def run(lib, without: int) -> None:
    x, y = torch.randn(1, 3, 64, 64).half() / 8, torch.randn(1, 64, 64).half() / 8
    w, out = torch.rand(1, 64), torch.empty(1, 3, 64, 64)
    ws, wp = torch.empty(1, 64, 64), torch.empty(1, 64, 64, dtype=torch.float16)
    launch(lib, "handshake", 1, [x, y, w, ws, wp, out], [INPUT] * 3 + [WORKSPACE] * 2 + [OUTPUT], [3, without])


def test_whole_kernel_runs(lib):
    assert len(NAMES) >= 15
    run(lib, -1)


@pytest.mark.parametrize("without", range(len(NAMES)), ids=NAMES)
def test_a_missing_wait_is_found(lib, without):
    with pytest.raises(PtoSimError) as caught:
        run(lib, without)
    assert caught.value.category in ("race", "v-after-v", "uninitialised", "deadlock")
