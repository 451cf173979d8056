"""Ascend 950 (A5): its data serves the passes, and no text is emitted for it."""
import pytest

from gdn_codegen import algorithms
from gdn_codegen.cli import main
from gdn_codegen.devices.ascend_a2 import ASCEND_A2
from gdn_codegen.devices.ascend_a5 import ASCEND_A5, UNKNOWN
from gdn_codegen.passes.pipelines import CORES, run_passes
from gdn_codegen.passes.storage.offsets import NoRoom
from gdn_codegen.prove.happens_before import check_waits
from gdn_codegen.runtime.build import Build
from gdn_codegen.schedule import named

#: A kernel that has no room in UB of A2.
LARGE = "gated_delta_product", "replay", {"C": 128, "K": 128, "V": 128}


def lowered(device, page, schedule, sizes):
    return run_passes(algorithms.find(page).trace(), CORES, device, named(schedule), sizes, "float16")


@pytest.mark.parametrize("page", ["gated_delta_rule", "gated_delta_product", "kimi_delta_attention"])
def test_its_programs_are_proved(unchecked, page):
    check_waits(lowered(ASCEND_A5, page, "staged", {"C": 64, "K": 128, "V": 128}), ASCEND_A5)


def test_it_has_more_room(unchecked):
    with pytest.raises(NoRoom, match="ascend_a2: UB has 188416 bytes"):
        lowered(ASCEND_A2, *LARGE)
    p = lowered(ASCEND_A5, *LARGE)
    assert max(b.offset for k in p.kernels for b in k.buffers if b.space == "UB") < ASCEND_A5.spaces["UB"]


def test_a_build_for_it_is_refused_and_says_what_is_not_known(tmp_path, capsys):
    with pytest.raises(ValueError, match=r"arch: got 'a5'; accepted: none for pto, as it is not known whether flags") as e:
        Build("pto", arch="a5")
    assert all(x in str(e.value) for x in UNKNOWN)
    assert main(["build", "--target", "pto", "--arch", "a5", "--out", str(tmp_path)]) != 0 and not list(tmp_path.iterdir())
    with pytest.raises(ValueError, match=r"accepted: none for pto$"):
        Build("pto", arch="a6")
