"""Targets with devices that are changed for a test."""
from dataclasses import replace

from gdn_codegen import targets


def change(monkeypatch, target, **fields):
    """Change fields of a target."""
    monkeypatch.setitem(targets._known, target, replace(targets.find(target), **fields))


def lower_for(monkeypatch, device, target, arch=""):
    """Lower for this device where the target is asked for."""
    x = targets.find(target)
    lowering = replace(x.lowered_for(arch), device=device)
    change(monkeypatch, target, **({"archs": {**x.archs, arch: lowering}} if arch else {"lowering": lowering}))
