"""The table of features and members in docs/contract.md: each cell is a call."""
from pathlib import Path

import pytest
import torch
from devices import H200
from features import FEATURES, REFUSED, table
from problems import CALLS
from tiers import every

from gdn_codegen.runtime.build import lowered
from gdn_codegen.runtime.call import launch
from gdn_codegen.runtime.call.request import Call, Request
from gdn_codegen.runtime.call.tables import Extent
from gdn_codegen.runtime.targets import runs
from gdn_codegen.schedule.contract import Contract

GPU = [t for t in ("triton", "tilelang") if runs(t, "cpu")]
#: What the default suite calls in PTO's simulator, of simple GLA: features that share few builds.
SIMULATED = ("packs", "rows", "scale", "views", "out", "state_order", "state_buffers", "pool", "checkpoints", "invariant",
             "choice", "steps", "drafts", "fake")
CELLS = [(n, page) for n in FEATURES for page in CALLS]


def tiers():
    """Cells by target. One member of every third feature is in the fast tier. TileLang's kernels take seconds to compile, so that
    each member has some of the features there. On Triton two cells of ten run by default, the others by hand (`-m long`): each
    feature has two members, and one of what torch traces, which takes longest."""
    for target in GPU:
        for n, (name, page) in enumerate((n, p) for n, p in CELLS if (n, p) not in REFUSED):
            f, at = FEATURES[name], (n + [*FEATURES].index(name)) % len(CALLS)
            if target == "triton" or at == 0:
                fast = target == "triton" and at == 0 and [*FEATURES].index(name) % 3 == 0
                traced = f.__name__ in ("opcheck", "compiled")
                fast = fast and not traced and f.__name__ != "captured"
                marks = () if fast else pytest.mark.long if at % (len(CALLS) if traced else 5) else pytest.mark.slow
                yield pytest.param(name, page, target, marks=marks, id=f"{f.__name__}-{page}-{target}")


def simulated():
    """Cells of PTO. Graphs are CUDA's."""
    for name, page in ((n, p) for n, p in CELLS if (n, p) not in REFUSED and runs("pto", "cpu")):
        if (what := FEATURES[name].__name__) != "captured":
            often = page == "simple_gla" and what in SIMULATED
            yield pytest.param(name, page, marks=pytest.mark.slow if often else pytest.mark.long, id=f"{what}-{page}")


@pytest.mark.parametrize("name, page, target", [*tiers()])
def test_what_gated_delta_net_takes(name, page, target):
    FEATURES[name](page, target)


@pytest.mark.parametrize("name, page", [*simulated()])
def test_what_gated_delta_net_takes_on_pto(name, page):
    FEATURES[name](page, "pto")


@pytest.mark.parametrize("name, page", REFUSED, ids=lambda x: FEATURES[x].__name__ if x in FEATURES else x)
def test_what_makes_no_sense_is_refused(name, page):
    with pytest.raises(ValueError, match=REFUSED[name, page]):
        FEATURES[name](page, GPU[0])


@pytest.mark.slow
@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("target, page", every(2, ["triton", "tilelang"], [p for p in CALLS if p != "gated_delta_product"]))
def test_few_tokens_are_chunks_of_one_token_on_a_gpu(page, target):
    """Those of Gated DeltaNet, for each page: one kernel without the axis of tokens."""
    forms = "dt=softplus" if page == "mamba2" else ""
    contract = Contract.parse(f"{forms},state=vk/float32/pool/in_place".strip(","))
    for tokens, chunk in ((1, 1), (4, 1), (16, 16)):
        asked = Request(target=target, decode=True, algorithm=page, forms=forms, state_v_first=True, in_place=True)
        call = Call(asked, torch.bfloat16, torch.device("cuda", 0), (128, 128), Extent(16, 16, 64, 64 * tokens), contract,
                    starts=True, wanted=True)
        b = launch.chosen(call, H200)
        assert (b.chunk, len(lowered(b).kernels)) == (chunk, 1)


def test_the_document_has_the_table():
    text = (Path(__file__).parents[2] / "docs" / "contract.md").read_text()
    assert "\n".join(table()) in text
