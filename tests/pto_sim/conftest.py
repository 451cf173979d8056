"""Compiles the kernels of this folder once a session."""
from __future__ import annotations

import ctypes
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from gdn_codegen import pto_sim

HERE = Path(__file__).parent


@pytest.fixture(scope="session")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], ctypes.CDLL]:
    """The library of a source beside this file."""
    folder = tmp_path_factory.mktemp("pto_sim")
    engine = pto_sim.runtime_object()  # of the cache, as other tests take it
    built: dict[str, ctypes.CDLL] = {}

    def get(name: str) -> ctypes.CDLL:
        if name not in built:
            source = HERE / f"{name}.cpp"
            names = re.findall(r"^(?:PTO_ENTRY void |PRODUCT\()(\w+)", source.read_text(), re.M)
            output = folder / f"{name}.so"
            pto_sim._compile(pto_sim.compile_command(source, names, output, runtime=engine))
            built[name] = pto_sim.load(output)
        return built[name]

    return get
