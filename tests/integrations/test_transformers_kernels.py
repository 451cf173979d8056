"""Our functions as a mapping for the package `kernels`, which transformers asks for kernels."""
import inspect
import subprocess
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import MethodType

import pytest
import torch
from reference import rms_error

from gdn_codegen import integrations
from gdn_codegen.runtime.targets import runs

pytest.importorskip("transformers", "5.23", reason="needs transformers, 5.23")
from small_transformers import MODELS

from gdn_codegen.integrations import transformers as plugin


def hosts():
    """The host's functions that ours stand for, by kernels' names, of all its models."""
    found = {n: [] for n in plugin.OURS}
    for name in MODELS:
        module = import_module(f"transformers.models.{name}.modeling_{name}")
        for f in vars(module).values():
            if (kernel := plugin._kernel(f)) in found:
                found[kernel].append(inspect.unwrap(f))
    return found


def test_parameters_are_the_host_s():
    """As `kernels` checks them, and by name besides."""
    for kernel, functions in hosts().items():
        layer = plugin.Repository(kernel).load()
        assert functions and issubclass(layer, torch.nn.Module) and layer.__init__ is torch.nn.Module.__init__
        members = {n for n, _ in inspect.getmembers(layer)} - {n for n, _ in inspect.getmembers(torch.nn.Module)}
        assert members <= {"can_torch_compile", "has_backward"}
        _, *ours = inspect.signature(layer.forward).parameters.values()
        for f in functions:
            assert [(p.name, p.kind) for p in ours] == [(p.name, p.kind) for p in inspect.signature(f).parameters.values()]


def test_the_mapping():
    mapping = plugin.kernel_mapping(("cuda",))
    assert mapping.keys() == plugin.OURS.keys() and mapping["chunk_kda"] == {"cuda": plugin.Repository("chunk_kda")}
    assert plugin.Repository("chunk_kda").load() is not None and plugin.kernel_mapping()["chunk_kda"].keys() >= {"cpu", "cuda"}


@pytest.mark.slow
@pytest.mark.skipif(not runs("tilelang", "cpu"), reason="needs TileLang and a C compiler")
def test_a_replaced_forward_calls_ours_or_the_host_s():
    """As `kernels` replaces it: the method of an object whose class has the host's."""
    integrations.reset()
    theirs = hosts()["chunk_gated_delta_rule"][0]
    host = type("Func", (torch.nn.Module,), {"forward": lambda self, *args, **kwargs: theirs(*args, **kwargs)})()
    host.forward = MethodType(plugin.Repository("chunk_gated_delta_rule").load().forward, host)
    x = [torch.randn(1, 70, h, 32) for h in (2, 2, 4)] + [-torch.rand(1, 70, 4), torch.rand(1, 70, 4)]
    said = dict(output_final_state=True, use_qk_l2norm_in_kernel=True, use_cache=True)
    for y, z in zip(host(*x, **said), theirs(*x, **said), strict=True):
        assert rms_error(y, z) < 1e-5
    o, _ = host(*(y.double() for y in x), **said)
    assert torch.equal(o, theirs(*(y.double() for y in x), **said)[0])
    served, left = integrations.report("transformers").splitlines()
    assert served.endswith("served: 1") and "left to the host (q: got torch.float64" in left
    host(*x, cu_seq_lens_q=torch.tensor([0, 30, 70]), max_length_q=39)
    assert "(max_length_q: got 39; accepted: at least 40, the tokens" in integrations.report()
    integrations.reset()


#: transformers 5.23 asks for `kernels` 0.18.2 or newer. 0.17.2 serves, too.
SCRIPT = """
import transformers.utils.import_utils as versions
versions.is_kernels_available.__wrapped__.__defaults__ = ("0.17.2", "1")
import torch
from small_transformers import make, prompts
from gdn_codegen import integrations
from gdn_codegen.integrations import transformers as plugin
for name, layers in (("qwen3_next", 3), ("kimi_linear", 3), ("nemotron_h", 2)):
    model, (ids, mask) = make(name), prompts()
    def tokens():
        return model.generate(ids, attention_mask=mask, max_new_tokens=4, min_new_tokens=4, do_sample=False).tolist()
    def calls():
        lines = integrations.report().splitlines()
        assert all(": served: " in line for line in lines), lines
        integrations.reset()
        return [int(line.split(": ")[-1]) for line in lines]
    plugin.enable(model)
    want = tokens()
    assert calls() == [layers, 3 * layers]
    plugin.disable(model)
    model.set_use_kernels(True, plugin.GeneratedKernels())
    assert tokens() == want and calls() == [layers, 3 * layers]
    model.train()
    model(ids, attention_mask=mask, labels=ids, use_cache=False).loss.backward()
    assert calls() == [layers]
print("done")
"""


@pytest.mark.long
@pytest.mark.skipif(not find_spec("kernels"), reason="needs the package kernels")
@pytest.mark.skipif(not runs("tilelang", "cpu"), reason="needs TileLang and a C compiler")
def test_models_with_the_package():
    """In a process of its own: decorators of transformers look for the package as they are imported."""
    here = Path(__file__).parent
    script = f"import sys; sys.path[:0] = [{str(here)!r}, {str(here.parents[1])!r}]\n{SCRIPT}"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout.strip() == "done", done.stderr
