"""Functions of a host's modules, by name, that are ours until they are given back."""
from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from .calls import falling_back


class Names:
    """The names that a plug-in replaces. host: its name for `report`.

    A module that imported a function by name has its own name for it, so each such module is listed, or its package is one of
    `importers`. What was bound before, as an attribute of a layer, stays what it was: plug-ins are enabled before models are
    built.
    """

    def __init__(self, host: str) -> None:
        self.host = host
        self._theirs: dict[tuple[Any, str], Any] = {}

    def replace(self, functions: Mapping[str, Mapping[str, Callable[..., Any]]], accepted: str,
                importers: tuple[str, ...] = ()) -> list[str]:
        """Replace functions: of a module's name, of a function's name, ours. Each falls back to the host's. Returns the names
        that were replaced by now: modules that do not exist, and names that the host has not or that are None, are left out.
        ImportError if there is none. accepted: for its text, which versions have some.

        importers: packages whose loaded modules get ours as well, where they have imported one of these functions.
        """
        # all are imported before a name is replaced, which another module of the host may import
        modules = {module: ours for at, ours in functions.items() if (module := _found(at)) is not None}
        for module, ours in modules.items():
            for name, op in ours.items():
                theirs, made = getattr(module, name, None), self.put(module, name, op)
                for holder in (m for n, m in [*sys.modules.items()] if made is not None and n.split(".")[0] in importers):
                    for other in [n for n, x in vars(holder).items() if x is theirs]:
                        self._theirs[holder, other] = theirs
                        setattr(holder, other, made)
        if not self._theirs:
            raise ImportError(f"{self.host}: got a version without {', '.join(functions)}; accepted: {accepted}")
        return self.names()

    def names(self) -> list[str]:
        """The names that are replaced now."""
        return [f"{m.__name__}.{name}" for m, name in self._theirs]

    def put(self, holder: Any, name: str, ours: Callable[..., Any]) -> Any:
        """Replace one name of a module, a class (a static method) or a namespace of torch's ops. Returns what it is now; None if
        it was replaced before, is absent or is None."""
        theirs = getattr(holder, name, None)
        if theirs is None or (holder, name) in self._theirs:
            return None
        static = isinstance(vars(holder).get(name), staticmethod)
        self._theirs[holder, name] = vars(holder)[name] if static else theirs
        made = falling_back(self.host, name, ours, theirs)
        setattr(holder, name, staticmethod(made) if static else made)
        return made

    def restore(self) -> None:
        """Give all names back."""
        for (holder, name), theirs in self._theirs.items():
            setattr(holder, name, theirs)
        self._theirs.clear()


def _found(name: str) -> ModuleType | None:
    """A module of the host, imported if need be; None if there is none. Other errors of its import are raised."""
    if name not in sys.modules:
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as e:
            if e.name is None or not (name == e.name or name.startswith(f"{e.name}.")):
                raise
            return None
    return sys.modules[name]
