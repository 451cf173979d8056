"""Targets with devices that are changed for a test, and devices as dispatch sees them."""
from dataclasses import replace

from gdn_codegen import targets
from gdn_codegen.runtime.call import choose, choose_decode
from gdn_codegen.runtime.call.device import described

H200 = described("NVIDIA H200")


def change(monkeypatch, target, **fields):
    """Change fields of a target."""
    monkeypatch.setitem(targets._known, target, replace(targets.find(target), **fields))


def lower_for(monkeypatch, device, target, arch=""):
    """Lower for this device where the target is asked for."""
    x = targets.find(target)
    lowering = replace(x.lowered_for(arch), device=device)
    change(monkeypatch, target, **({"archs": {**x.archs, arch: lowering}} if arch else {"lowering": lowering}))


def passes_for(monkeypatch, facts):
    """Let every device pass for this one in choices, which are not kept."""
    for module in choose, choose_decode:
        monkeypatch.setattr(module, "facts", lambda device: facts)
        monkeypatch.setattr(module, "kept_choice", getattr(module.kept_choice, "__wrapped__", module.kept_choice))
