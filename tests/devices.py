"""Targets with devices that are changed for a test."""
from dataclasses import replace

from gdn_codegen import targets


def lower_for(monkeypatch, device, target, arch=""):
    """Lower for this device where the target is asked for."""
    x = targets.find(target)
    lowering = replace(x.lowered_for(arch), device=device)
    changed = replace(x, archs={**x.archs, arch: lowering}) if arch else replace(x, lowering=lowering)
    monkeypatch.setitem(targets._known, target, changed)
