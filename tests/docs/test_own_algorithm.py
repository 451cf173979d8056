"""The page that docs/your_own_algorithm.md writes from scratch agrees with its recurrence, and takes what the document says."""
import re
from pathlib import Path

import pytest
import torch

from gdn_codegen import pages
from gdn_codegen.algorithms import load
from gdn_codegen.ir.page import Algorithm
from gdn_codegen.tools.cases import Case

TEXT = (Path(__file__).parents[2] / "docs" / "your_own_algorithm.md").read_text()
FILE, CALL = re.findall(r"```python\n(.*?)```", TEXT.partition("## Kimi Delta Attention from scratch")[2], re.S)[:2]


@pytest.mark.slow
def test_the_page_from_scratch(tmp_path):
    file = tmp_path / "kda.py"
    file.write_text(FILE)
    page, by_token = (load("algorithm", f"{file}:{n}", kind, "function")
                      for n, kind in (("my_kda", Algorithm), ("by_token", object)))
    pages.verify(page, (Case((17, 0, 70)), Case((33,), gate=-50.0)), target="triton", head_dim_k=64, head_dim_v=64,
                 reference=by_token)
    x = {n: torch.randn(1, 20, *shape).bfloat16() for n, shape in
         dict(q=(1, 64), k=(1, 64), v=(2, 64), g=(2, 64)).items()} | {"beta": torch.randn(1, 20, 2)}
    names = {"pages": pages, "my_kda": page, "A_log": torch.zeros(2), "dt_bias": torch.randn(2, 64), **x}
    exec(CALL, names)
    assert names["o"].shape == (1, 20, 2, 64) and names["S"].isfinite().all()
