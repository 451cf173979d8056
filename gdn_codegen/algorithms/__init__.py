"""A page a family member. `find` takes a name of this package or FILE.py:FUNCTION."""
from __future__ import annotations

import importlib
import importlib.util
import pkgutil
from pathlib import Path

from ..ir.builder import Algorithm


def names() -> list[str]:
    """The algorithms of the package."""
    return sorted(m.name for m in pkgutil.iter_modules(__path__))


def find(spec: str) -> Algorithm:
    """The algorithm called `spec`: a name from `names()`, or FILE.py:FUNCTION for a page of the user's own."""
    if ":" in spec:
        file, _, function = spec.rpartition(":")
        path = Path(file)
        if path.suffix != ".py" or not path.is_file():
            raise ValueError(f"algorithm: got {spec!r}; {file} is not a Python file")
        loader = importlib.util.spec_from_file_location(path.stem, path.resolve())
        assert loader is not None and loader.loader is not None
        module = importlib.util.module_from_spec(loader)
        loader.loader.exec_module(module)
        found = getattr(module, function, None)
        if not isinstance(found, Algorithm):
            have = sorted(n for n, v in vars(module).items() if isinstance(v, Algorithm))
            raise ValueError(f"algorithm: got {spec!r}; {file} has {', '.join(have) or 'no function under @algorithm'}")
        return found
    if spec not in names():
        raise ValueError(f"algorithm: got {spec!r}; accepted are {', '.join(names())} and FILE.py:FUNCTION")
    page: Algorithm = getattr(importlib.import_module(f"{__name__}.{spec}"), spec)
    return page
