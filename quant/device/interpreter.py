"""Triton's interpreter, in which tests run the GPU's kernels, at half of the time that it takes by itself.

A launch replaces the functions of Triton's language by interpreted ones, and takes them back at its end. Triton 3.9 also looks
for functions to replace at each call of one kernel function by another, among all names of the language, and finds none. Here a
launch looks through each module of the language once. Launches of several threads run one after another, since each would take
back the functions of the others. Interpreters of another form are left as they are.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

from triton.runtime import interpreter


class _ReplaceOnce:
    """What Triton calls to replace the functions that a kernel function sees; it calls `replace` for the first of a launch."""

    def __init__(self, replace: Any) -> None:
        self._replace, self._lock = replace, threading.RLock()
        self._replaced: frozenset[str] = frozenset()

    def __call__(self, fn: Any) -> Any:
        """The replacements that the caller takes back. Those of another function of the launch are that one's to take back."""
        seen = _languages(fn)
        if seen <= self._replaced:
            return interpreter._LangPatchScope()
        self._replaced |= seen
        return self._replace(fn)

    @contextmanager
    def launch(self) -> Iterator[None]:
        with self._lock:
            before, self._replaced = self._replaced, frozenset()
            try:
                yield
            finally:
                self._replaced = before


@cache
def _languages(fn: Any) -> frozenset[str]:
    """The names of the language's modules that a function sees."""
    modules = (interpreter.tl, interpreter.tl.core)
    return frozenset(m.__name__ for m in modules if any(value is m for value in fn.__globals__.values()))


def replace_once_a_launch() -> None:
    """Has the interpreter of this process look for functions to replace once a launch. A further call changes nothing."""
    replace = getattr(interpreter, "_patch_lang", None)
    if isinstance(replace, _ReplaceOnce) or not hasattr(interpreter, "_LangPatchScope"):
        return
    once, run = _ReplaceOnce(replace), interpreter.GridExecutor.__call__

    def launched(executor: Any, *arguments: Any, **constants: Any) -> None:
        with once.launch():
            run(executor, *arguments, **constants)

    interpreter._patch_lang = once
    interpreter.GridExecutor.__call__ = launched
