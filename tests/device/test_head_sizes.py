"""Generated modules with small and odd K and V on a CUDA GPU. Run with: pytest -m device tests/device"""
import pytest
import torch

from gdn_codegen.runtime.build import Build
from gdn_codegen.runtime.call.choose import unfit
from gdn_codegen.runtime.load import module
from gdn_codegen.runtime.targets import runs
from gdn_codegen.schedule.contract import Contract
from gdn_codegen.targets import OWN

pytestmark = [pytest.mark.device, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]
HERE = [t for t in OWN if t != "pto" and runs(t, "cuda")]


@pytest.mark.parametrize("accept", ["", "g=raw,beta=sigmoid,q=l2norm,k=l2norm"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("K, V", [(16, 16), (16, 48), (36, 16), (32, 100), (144, 40)])
@pytest.mark.parametrize("page", ["gated_delta_rule", "kimi_delta_attention"])
@pytest.mark.parametrize("target", HERE)
def test_small_and_odd_heads(target, page, K, V, dtype, accept):
    """Blocks of few threads, because products have few tiles; rows that are no multiple of 16 bytes."""
    contract = Contract.parse(accept.replace("g=raw", "g=safe") if page != "gated_delta_rule" else accept)
    b = Build(target, 64, "bthd", page, dtype=dtype, head_dim_k=K, head_dim_v=V, contract=contract)
    if why := unfit(b):
        pytest.skip(why)
    errors = module(b).check.errors(torch.device("cuda"))
    assert all(e <= most for e, most in errors.values()), errors
