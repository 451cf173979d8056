"""The table of features and members in docs/contract.md: each cell is a call."""
from pathlib import Path

import pytest
from features import FEATURES, REFUSED, table
from problems import CALLS

from gdn_codegen.runtime.targets import runs

GPU = [t for t in ("triton", "tilelang") if runs(t, "cpu")]
CELLS = [(n, page) for n in FEATURES for page in CALLS]


def tiers():
    """Cells by target. One member of each feature is in the fast tier. TileLang's kernels take seconds to compile, so that each
    member has some of the features there."""
    for target in GPU:
        for n, (name, page) in enumerate((n, p) for n, p in CELLS if (n, p) not in REFUSED):
            f, at = FEATURES[name], (n + [*FEATURES].index(name)) % len(CALLS)
            if target == "triton" or at == 0:
                fast = target == "triton" and at == 0 and f.__name__ not in ("opcheck", "compiled")
                yield pytest.param(name, page, target, marks=() if fast else pytest.mark.slow, id=f"{f.__name__}-{page}-{target}")


@pytest.mark.parametrize("name, page, target", [*tiers()])
def test_what_gated_delta_net_takes(name, page, target):
    FEATURES[name](page, target)


@pytest.mark.parametrize("name, page", REFUSED, ids=lambda x: FEATURES[x].__name__ if x in FEATURES else x)
def test_what_makes_no_sense_is_refused(name, page):
    with pytest.raises(ValueError, match=REFUSED[name, page]):
        FEATURES[name](page, GPU[0])


def test_the_document_has_the_table():
    text = (Path(__file__).parents[2] / "docs" / "contract.md").read_text()
    assert "\n".join(table()) in text
