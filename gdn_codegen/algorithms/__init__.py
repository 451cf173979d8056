"""The pages of the package, one for each algorithm. `find` takes the name of one of them, or FILE.py:FUNCTION."""
from __future__ import annotations

import importlib
import importlib.util
import pkgutil
import traceback
from functools import cache
from pathlib import Path
from typing import Any

from ..ir.page import Algorithm
from . import layers

#: The input forms that inputs of the package's pages may have. An input of another page may have any form that suits its dims.
FORMS = {"q": ("l2norm",), "k": ("l2norm", "unit"), "v": (), "g": ("linear", "raw", "bounded", "safe", "floored"),
         "beta": ("sigmoid", "twice_sigmoid"), "dt": ("softplus", "rectified")}
#: How tools draw inputs whose dims do not say it, as a layer has them. "share": from 0 to 1 for each channel. "minus NAME":
#: another input with the other sign, times a number from 0 to 1 for each token, so that what is erased is at most what is there.
DRAWN = {("gated_delta_rule_2", "b"): "share", ("gated_delta_rule_2", "w"): "share", ("rwkv7", "b"): "minus a"}
#: File names of modules use a page's short name where there is one.
SHORT = {"gated_delta_rule": "gdn"}


@cache
def names() -> tuple[str, ...]:
    """The members of the family that the package has."""
    return tuple(sorted(m.name for m in pkgutil.iter_modules(__path__) if not m.ispkg))


@cache
def of_layers() -> tuple[str, ...]:
    """The package's other pages: what layers compute around the members."""
    return tuple(sorted(m.name for m in pkgutil.iter_modules(layers.__path__)))


def find(spec: str | Algorithm) -> Algorithm:
    """The algorithm called `spec`: a name from `names()` or `of_layers()`, FILE.py:FUNCTION for a page of the user's own, or that
    page itself."""
    if isinstance(spec, Algorithm):
        return _own(spec, spec.name)
    if ":" in spec:
        page: Algorithm = load("algorithm", spec, Algorithm, "function under @algorithm")
        return _own(page, spec)
    if spec not in (*names(), *of_layers()):
        raise ValueError(f"algorithm: got {spec!r}; accepted are {', '.join((*names(), *of_layers()))} and FILE.py:FUNCTION")
    page = getattr(importlib.import_module(_module(spec)), spec)
    return page


def _module(name: str) -> str:
    """The module of one of the package's pages."""
    return f"{__name__}.{name}" if name in names() else f"{layers.__name__}.{name}"


def _own(page: Algorithm, spec: str) -> Algorithm:
    """A page of the user's own, whose modules must not bear the names of the package's."""
    taken = (*names(), *of_layers())
    packaged = page.name in taken and page.fn.__module__ == _module(page.name)
    if not packaged and page.name in (*taken, *SHORT.values()):
        raise ValueError(f"algorithm: got {spec!r}, whose modules would have the names of the package's own; accepted: a "
                         f"function that is not called {', '.join((*taken, *SHORT.values()))}: rename it")
    return page


def load(argument: str, spec: str, kind: Any, what: str) -> Any:
    """The object that FILE.py:NAME names. ValueError if there is no such file, or no object of this kind in it.

    argument: the argument that the error names. kind: a class, for `isinstance`. what: how the error names such an object.
    """
    file, _, name = spec.rpartition(":")
    path = Path(file)
    if path.suffix != ".py" or not path.is_file():
        raise ValueError(f"{argument}: got {spec!r}; {file} is not a Python file; accepted: FILE.py:NAME")
    loader = importlib.util.spec_from_file_location(path.stem, path.resolve())
    assert loader is not None and loader.loader is not None
    module = importlib.util.module_from_spec(loader)
    try:
        loader.loader.exec_module(module)
    except (Exception, SystemExit) as e:
        inner = [f.lineno for f in traceback.extract_tb(e.__traceback__) if f.filename == str(path.resolve())]
        line = e.lineno if isinstance(e, SyntaxError) else inner[-1] if inner else None
        said = e.msg if isinstance(e, SyntaxError) else " ".join(str(e).split())
        where = f" in line {line}" if line else ""
        raise ValueError(f"{argument}: got {spec!r}, whose file fails{where} ({type(e).__name__}: {said}); accepted: a Python "
                         "file that imports") from e
    if name not in vars(module):
        own = (path.stem, kind.__module__)  # functions of the file itself, and objects of the kind
        have = sorted(n for n, v in vars(module).items() if isinstance(v, kind) and getattr(v, "__module__", "") in own)
        raise ValueError(f"{argument}: got {spec!r}; {file} has {', '.join(have) or f'no {what}'}")
    found = getattr(module, name)
    if not isinstance(found, kind):
        raise ValueError(f"{argument}: got {spec!r}, of type {type(found).__name__}; accepted: a {what}")
    return found
