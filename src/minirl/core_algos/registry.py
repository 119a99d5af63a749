"""A table of functions by name: filled by decorators, read-only for everybody else.

name -> function, for advantage estimators, policy losses and distillation losses.
Simplified against verl: one class instead of three dicts with three sets of rules.
verl: verl.trainer.ppo.core_algos:register_adv_est, verl.trainer.ppo.core_algos:register_policy_loss
"""

import difflib
from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import Enum
from typing import TypeVar

F = TypeVar("F", bound=Callable)


class Registry(Mapping[str, Callable]):
    """Mapping of name -> function. The only way in is `register`; there is no way to overwrite or delete."""

    def __init__(self, what: str, option: str) -> None:
        """`what` and `option` (the config key that selects a name) are used in error messages only."""
        self.what = what
        self.option = option
        self._functions: dict[str, Callable] = {}

    def register(self, *names: str | Enum) -> Callable[[F], F]:
        """Decorator that files a function under each of `names`.

        Raises ValueError when a name is taken by another function. The same function twice is accepted.
        """

        def decorator(fn: F) -> F:
            plain = [str(name.value) if isinstance(name, Enum) else name for name in names]
            for name in plain:
                if self._functions.get(name, fn) is not fn:
                    raise ValueError(f"{self.what} '{name}' is already registered; choose another name")
            self._functions.update(dict.fromkeys(plain, fn))
            return fn

        return decorator

    def find(self, name: str | Enum) -> Callable:
        """The function called `name`. Raises ValueError with the nearest known name."""
        plain = str(name.value) if isinstance(name, Enum) else name
        if plain not in self._functions:
            raise ValueError(unknown_name(self.what, plain, self._functions, self.option))
        return self._functions[plain]

    def __getitem__(self, name: str) -> Callable:
        return self._functions[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._functions)

    def __len__(self) -> int:
        return len(self._functions)


def unknown_name(what: str, name: object, known: Iterable[str], option: str) -> str:
    """One line for an unknown name: the option to change, the nearest known name, and all of them."""
    known = list(known)
    near = difflib.get_close_matches(str(name), known, n=1)
    guess = f"; did you mean '{near[0]}'?" if near else ""
    return f"{option}: unknown {what} '{name}'{guess} (known: {', '.join(known)})"
