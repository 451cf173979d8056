"""Reports on stderr what a long step is doing. stdout has results only, because scripts read it."""
from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Iterator

#: Seconds before the first line, and from one line to the next.
PATIENCE, AGAIN = 2.0, 30.0
_inside = threading.local()


@contextlib.contextmanager
def under_way(what: str) -> Iterator[None]:
    """Prints plain lines while a step runs. If steps are nested, only the outermost one prints."""
    if getattr(_inside, "yes", False):
        yield
        return
    done = threading.Event()
    teller = threading.Thread(target=_tell, args=(what, done), daemon=True)
    _inside.yes = True
    teller.start()
    try:
        yield
    finally:
        _inside.yes = False
        done.set()
        teller.join()  # no line of it comes after the result's


def _tell(what: str, done: threading.Event) -> None:
    start, wait = time.perf_counter(), PATIENCE
    while not done.wait(wait):
        with contextlib.suppress(AttributeError, OSError, ValueError):  # stderr may be closed, or None
            print(f"gdn_codegen: {what}: {time.perf_counter() - start:.0f} s so far", file=sys.stderr, flush=True)
        wait = AGAIN


def first_call(what: str) -> contextlib.AbstractContextManager[None]:
    """`under_way` for calls of ops: it prints at a terminal or with GDN_DEBUG=1, and nothing in logs."""
    return under_way(what) if _told() else contextlib.nullcontext()


def _told() -> bool:
    return os.environ.get("GDN_DEBUG", "0") not in ("", "0") or bool(sys.stderr and sys.stderr.isatty())
