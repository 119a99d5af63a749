"""Plant one slip at a time into a copy of minirl.core_algos and see whether the fast core tests notice.

A slip is a small edit that a tired author makes: a sign, a shift by one, a biased std, a sum for a mean, a
detached gradient. The mutated source exists in memory only: the package is imported afresh with one module's
text replaced, and the test file is run against it in the same process (a pytest process per slip would take
minutes). The slips themselves are in slips.py.
"""

import importlib.abc
import importlib.util
import inspect
import itertools
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import Phase, settings

import minirl

SOURCE = Path(minirl.__file__).parent / "core_algos"
TESTS = Path(__file__).parent.parent / "core_algos"
PACKAGE = "minirl.core_algos"
settings.register_profile("no shrinking", phases=[Phase.explicit, Phase.generate])  # failing is all we ask


@dataclass(frozen=True)
class Slip:
    """Replace `old`, which must occur exactly once in `module`, by `new`; `tests` should notice."""

    kind: str
    module: str  # relative to core_algos, e.g. "advantage/gae.py"
    old: str
    new: str
    tests: str  # relative to tests/core_algos

    def source(self) -> str:
        text = (SOURCE / self.module).read_text(encoding="utf-8")
        count = text.count(self.old)
        if count != 1:
            raise ValueError(
                f"{self.module}: {self.old!r} occurs {count} times; a slip needs exactly one place"
            )
        return text.replace(self.old, self.new)

    def __str__(self) -> str:
        return f"{self.module.removesuffix('.py')}: {self.kind}"


class OneModuleChanged(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the module of the slip before the ordinary finders do, and loads the changed text."""

    def __init__(self, slip: Slip) -> None:
        parts = slip.module.removesuffix(".py").removesuffix("/__init__").split("/")
        self.name, self.is_package = ".".join([PACKAGE, *parts]), slip.module.endswith("/__init__.py")
        self.path = str(SOURCE / slip.module)
        self.text = slip.source()

    def find_spec(self, fullname, path, target=None):
        if fullname != self.name:
            return None
        spec = importlib.util.spec_from_loader(fullname, self, origin=self.path, is_package=self.is_package)
        if self.is_package:
            spec.submodule_search_locations = [str(Path(self.path).parent)]
        return spec

    def exec_module(self, module):
        module.__file__ = self.path
        exec(compile(self.text, self.path, "exec"), vars(module))


@contextmanager
def planted(slip: Slip | None) -> Iterator[None]:
    """Inside, importing minirl.core_algos gives a fresh package, with the slip if there is one."""
    ours = {name: module for name, module in sys.modules.items() if name.split(".")[:2] == PACKAGE.split(".")}
    attribute = getattr(minirl, "core_algos", None)
    for name in ours:
        del sys.modules[name]
    finder = OneModuleChanged(slip) if slip else None
    if finder:
        sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        if finder:
            sys.meta_path.remove(finder)
        for name in [n for n in sys.modules if n.split(".")[:2] == PACKAGE.split(".")]:
            del sys.modules[name]
        sys.modules.update(ours)
        if attribute is not None:
            minirl.core_algos = attribute


def cases(fn: types.FunctionType) -> Iterator[dict]:
    """The keyword arguments that pytest.mark.parametrize would give; `{}` for a test without parameters."""
    axes = []
    for mark in getattr(fn, "pytestmark", []):
        names, values = mark.args
        names = [n.strip() for n in names.split(",")] if isinstance(names, str) else list(names)
        axes.append([dict(zip(names, v if len(names) > 1 else (v,), strict=True)) for v in values])
    for combination in itertools.product(*axes):
        yield {key: value for part in combination for key, value in part.items()}


def failing_test(slip: Slip | None, tests: str) -> str | None:
    """The name of the first test of the file that fails with the slip planted, or None when all pass."""
    with planted(slip):
        module = types.ModuleType("core_tests_with_a_slip")
        module.__file__ = str(TESTS / tests)
        usual = settings.get_current_profile_name()
        settings.load_profile("no shrinking")
        try:
            exec(compile((TESTS / tests).read_text(encoding="utf-8"), module.__file__, "exec"), vars(module))
        finally:
            settings.load_profile(usual)
        for name, fn in inspect.getmembers(module, callable):
            if not name.startswith("test_"):
                continue
            for arguments in cases(fn):
                try:
                    fn(**arguments)
                except (Exception, pytest.fail.Exception):
                    return name
    return None
