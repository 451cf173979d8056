"""The text of TileLang for other GPUs than Hopper, on the GPU that is here: products by mma.sync, within their shared memory."""
import pytest
import torch

from gdn_codegen import algorithms
from gdn_codegen.runtime.build import Build
from gdn_codegen.runtime.call.choose import modelled, unfit
from gdn_codegen.runtime.call.device import SHARED_KIB
from gdn_codegen.runtime.call.gradient_builds import asked_of, candidates
from gdn_codegen.runtime.load import module
from gdn_codegen.runtime.targets import runs

pytestmark = [pytest.mark.device, pytest.mark.skipif(not (torch.cuda.is_available() and runs("tilelang", "cuda")),
                                                     reason="needs a CUDA GPU and TileLang")]


def for_arch(m, arch):
    """The module, whose kernels compile from their text for `arch` to code for the GPU that is here."""
    import tilelang
    launcher, here = m._launcher, "sm_{}{}".format(*torch.cuda.get_device_capability())

    def compiled(name, _):
        return tilelang.compile(launcher.program(name), target={"kind": "cuda", "arch": arch, "code": [here]},
                                pass_configs=launcher.passes[name])

    launcher.compiled = compiled
    return m


@pytest.mark.parametrize("arch", ["sm_80", "sm_89"])
@pytest.mark.parametrize("page", algorithms.names())
def test_what_dispatch_takes_there_is_right(page, arch):
    """By the self-checks of the modules, forward and backward, K = V = 128."""
    b = Build("tilelang", algorithm=page, dtype="bfloat16")
    forward = ([x.for_shared(SHARED_KIB[arch])] for x, _ in modelled(b, "", False, (0, 3, 12), None))
    backward = (x.for_shared(SHARED_KIB[arch]).all for x in candidates(asked_of(b, True), "cuda", "", 64))
    for found in (forward, backward):
        for x in next(builds for builds in found if not any(map(unfit, builds))):
            assert for_arch(module(x), arch).check("cuda"), x.name
