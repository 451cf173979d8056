"""Templates hold imports and constants; what kernels call and what launches them is copied from emit/ and host/."""
import ast
from pathlib import Path

import pytest

import gdn_codegen
from gdn_codegen.emit.device_functions import definitions
from gdn_codegen.runtime.build import Build, render
from gdn_codegen.schedule import varied
from gdn_codegen.targets import OWN

PACKAGE = Path(gdn_codegen.__file__).parent
COPIED = [*sorted((PACKAGE / "host").glob("*.py")), PACKAGE / "devices" / "part_cost.py"]
#: What kernels are made of beside their own functions: functions that they call.
CALLED = {n for path in [*(PACKAGE / "emit" / "tilelang" / "device").glob("*.py"), PACKAGE / "emit" / "triton" / "device.py"]
          for n in definitions(path)}
BUILDS = [*(Build(target, schedule="staged") for target in OWN), Build("tilelang", arch="sm_90a", schedule="walk"),
          Build("triton", dtype="bfloat16", schedule=varied("walk", partition="decay", longest_first=True, descriptors=True))]


def defined(text):
    """The functions and classes of a module's top level."""
    return {n.name for n in ast.parse(text).body if isinstance(n, ast.FunctionDef | ast.ClassDef)}


@pytest.mark.parametrize("b", BUILDS, ids=lambda b: f"{b.target}-{b.name}")
def test_a_module_has_no_host_function_of_its_own(b):
    host = set().union(*(defined(path.read_text()) for path in COPIED))
    own = defined(render(b)) - host
    kernels = {n for n in own if n.endswith("_kernel")}
    assert own - kernels - CALLED == {b.function, "_page"} and bool(kernels) == (b.target != "pto")
