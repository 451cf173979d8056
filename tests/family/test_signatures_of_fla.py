"""Ops beside the signatures in FLA's source (0.6.0 or newer), which is read and not imported."""
import ast
import importlib.util
import inspect
from pathlib import Path

import pytest

import gdn_codegen

FLA = importlib.util.find_spec("fla")
pytestmark = pytest.mark.skipif(FLA is None, reason="needs flash-linear-attention")
OPS = [(n, f"{kind}_{n}") for n in ("delta_rule", "simple_gla", "lightning_attn", "gla", "kda", "gdn2", "rwkv7")
       for kind in ("chunk", "fused_recurrent")]


@pytest.mark.parametrize("folder, name", [*OPS, ("gated_delta_product", "chunk_gated_delta_product"),
                                          ("gated_delta_rule", "fused_recurrent_gated_delta_rule"),
                                          ("rwkv7", "fused_mul_recurrent_rwkv7")])
def test_positional_arguments_are_flas(folder, name):
    file = "chunk.py" if name.startswith("chunk") else "fused_recurrent.py"
    (fla,) = FLA.submodule_search_locations
    (want,) = (f for f in ast.parse((Path(fla) / "ops" / folder / file).read_text()).body
               if isinstance(f, ast.FunctionDef) and f.name == name)
    ours = inspect.signature(getattr(gdn_codegen, name)).parameters.values()
    assert [p.name for p in ours if p.kind is p.POSITIONAL_OR_KEYWORD] == [a.arg for a in want.args.args]
