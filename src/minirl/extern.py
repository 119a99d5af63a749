"""Loads what the user wrote: an object by file and name (a reward function, a dataset class), whole modules.

in: "path/to/file.py" or "pkg://package.module", and a name -> out: the object.
verl: verl.utils.import_utils:load_extern_object, import_external_libs
"""

import importlib
import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_PKG, _FILE = "pkg://", "file://"


def load_extern_object(module_path: str, object_name: str, key: str) -> Any:
    """The object `object_name` of the module at `module_path`. `key` is the configuration section to name.

    Raises ValueError: no such file, a module that fails while loading, no such name in it.
    verl: verl.utils.import_utils:load_extern_object
    """
    try:
        if module_path.startswith(_PKG):
            module = importlib.import_module(module_path.removeprefix(_PKG).replace("/", "."))
        else:
            module = _load_file(Path(module_path.removeprefix(_FILE)).expanduser(), key)
    except ValueError:
        raise
    except Exception as error:  # whatever the user's module raises while it is executed
        raise ValueError(
            f"{key}.path={module_path}: loading it raised {type(error).__name__}: {error}"
        ) from error
    if object_name not in vars(module):
        names = sorted(name for name, value in vars(module).items() if callable(value) and name[0] != "_")
        raise ValueError(
            f"{key}.name={object_name}: not in {module_path}, which has {', '.join(names) or 'none'}"
        )
    return vars(module)[object_name]


def import_external_libs(external_lib: str | Sequence[str] | None) -> None:
    """Import `actor_rollout_ref.model.external_lib`: what it registers is then known in this process.

    Raises ValueError for a module that is not found or fails while it is imported.
    verl: verl.utils.import_utils:import_external_libs
    """
    for name in [external_lib] if isinstance(external_lib, str) else external_lib or []:
        try:
            importlib.import_module(name)
        except Exception as error:  # whatever the user's module raises while it is executed
            raise ValueError(
                f"actor_rollout_ref.model.external_lib={name}: importing it raised "
                f"{type(error).__name__}: {error}; give the name of a module on PYTHONPATH"
            ) from error


def _load_file(path: Path, key: str):
    if not path.is_file():
        raise ValueError(f"{key}.path={path}: no such file; give the path of a .py file")
    spec = importlib.util.spec_from_file_location(f"minirl_extern_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise ValueError(f"{key}.path={path}: not a Python file; give the path of a .py file")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise ValueError(f"{key}.path={path}: loading it raised {type(error).__name__}: {error}") from error
    return module
