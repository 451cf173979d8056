"""Configurations of peers' autotuned Triton kernels, compiled side by side before Triton times them.

Triton's autotuner compiles a configuration when its turn to be timed comes. FLA's kernels have dozens each, so that the first
call of an op waits minutes for one core.
"""
from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from typing import Any


@contextlib.contextmanager
def compiled_side_by_side(threads: int | None) -> Iterator[None]:
    """Within the context, the autotuner compiles all configurations of a kernel in threads before it times the first. threads:
    how many, by default one for each core that this process may use. One thread gains nothing, and a Triton without
    AsyncCompileMode has no way: both are left to what Triton does. So is a kernel whose configurations this cannot compile, with
    a line on stderr."""
    threads = threads or len(os.sched_getaffinity(0))
    with contextlib.ExitStack() as patched:
        try:
            if threads > 1:
                from triton.runtime._async_compile import AsyncCompileMode
                from triton.runtime.autotuner import Autotuner
                _patch(Autotuner, functools.partial(_compile, AsyncCompileMode, threads), patched)
        except ImportError:
            pass
        except Exception as e:
            _say_once(e)
        yield


def _patch(tuner: Any, compile_all: Any, patched: contextlib.ExitStack) -> None:
    """Has the class `tuner` compile the configurations that it is about to time, until `patched` ends."""
    plain = tuner.prune_configs

    def prune_configs(self: Any, kwargs: dict[str, Any]) -> Any:
        found = plain(self, kwargs)
        if len(found) > 1:  # Triton times no single one
            try:
                compile_all(self, kwargs, found)
            except Exception as e:
                _say_once(e)
        return found
    tuner.prune_configs = prune_configs
    patched.callback(setattr, tuner, "prune_configs", plain)


class _Threads(ThreadPoolExecutor):
    """Threads that begin nothing once they are stopped. What does not begin ends with an error: AsyncCompileMode waits for all
    that was submitted, and would for ever if that were cancelled."""

    stopped = False

    def submit(self, f: Callable[..., Any], /, *args: Any, **named: Any) -> Future[Any]:
        """As that of any executor."""
        return super().submit(self._begin, f, *args, **named)

    def _begin(self, f: Callable[..., Any], *args: Any, **named: Any) -> Any:
        if self.stopped:
            raise CancelledError
        return f(*args, **named)


def _compile(mode: Any, threads: int, tuner: Any, kwargs: dict[str, Any], configurations: Any) -> None:
    """Compile the configurations of a kernel for a call, as that call's launches would. Errors of the compiler are left out:
    Triton meets them again where it times the configuration, and knows which of them only rule it out."""
    pool = _Threads(threads)
    try:
        with mode(pool, ignore_errors=True):
            try:
                for c in configurations:
                    tuner.fn.run(*tuner.nargs.values(), **{**kwargs, **c.all_kwargs(), "warmup": True})
            except KeyboardInterrupt:  # the mode waits for what was submitted
                pool.stopped = True
                raise
    except KeyboardInterrupt:
        pool.stopped = True
        raise
    finally:
        pool.shutdown(wait=False)


def _say_once(e: Exception) -> None:
    _say(f"{type(e).__name__}: {' '.join(str(e).split())[:300]}")


@functools.cache
def _say(why: str) -> None:
    """A line on stderr, of which a process has each once."""
    print(f"gdn_codegen: configurations of a Triton kernel compile one after another: {why}", file=sys.stderr, flush=True)
