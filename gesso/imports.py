"""Importing by name: user code, installed packages, and subprocesses with the same import path.

User code is named "module:Name", or "path/file.py:Name" for a file. The working folder is the last
entry of the import path, so that a file there cannot shadow a module of Python or of a package.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from gesso.types import UserError

FILE = ".py"  # a reference whose first part has this suffix is a path


def import_path() -> list[str]:
    """The import path with the working folder last."""
    try:
        folder = os.getcwd()
    except FileNotFoundError as error:
        raise UserError("the working folder no longer exists; change to another one") from error
    return [entry for entry in sys.path if entry not in ("", folder)] + [folder]


def command(module: str, *arguments: str, python: str | None = None) -> list[str]:
    """The command that runs `main()` of `module` in another process with this import path and this
    copy of Gesso: there may be another one, installed. `python -m` would put the working folder
    first; its option -P needs Python 3.11. Another interpreter, `python`, has the packages of its
    own environment instead of this import path."""
    copy, path = str(Path(__file__).parents[1]), import_path()
    entries = repr([copy, *path])
    if python is not None:
        entries = f"[{copy!r}, *(p for p in sys.path if p not in ('', {path[-1]!r})), {path[-1]!r}]"
    code = (
        f"import sys; sys.path[:] = {entries}; import gesso; del sys.path[0]; "
        f"from {module} import main; main()"
    )
    return [python or sys.executable, "-c", code, *arguments]


def is_user_code(name: str) -> bool:
    """Whether a name in a recipe refers to code outside Gesso."""
    return ":" in name


def is_installed(package: str) -> bool:
    """Whether the package can be imported. A folder of that name without code, such as the one that
    wandb creates in the working folder, does not count."""
    spec = importlib.util.find_spec(package)
    return spec is not None and spec.origin is not None


def load(reference: str, what: str) -> Any:
    """The object at "module:Name" or "file.py:Name"; `what` names its kind in errors: "reward"."""
    module_name, _, name = reference.rpartition(":")
    if not module_name or not name:
        raise UserError(
            f'{what} "{reference}": expected "module:Name" or "file.py:Name", with text on both '
            "sides of the colon"
        )
    try:
        if module_name.endswith(FILE):
            module = _from_file(Path(os.path.expanduser(module_name)))
        else:
            module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # user code may fail in any way
        reason = f"{type(error).__name__}: {error}"
        raise UserError(
            f'{what} "{reference}" cannot be imported: {reason}{_shadowed(module_name)}'
        ) from error
    try:
        return getattr(module, name)
    except AttributeError:
        place = getattr(module, "__file__", None) or "built into Python"
        raise UserError(
            f'{what} "{reference}": module {module_name} ({place}) has no "{name}"'
            f"{_shadowed(module_name)}"
        ) from None


def _from_file(path: Path) -> ModuleType:
    """Imports a file by its path, once, under a unique name: `math.py` is not Python's math."""
    path = path.resolve()
    unique = f"{path.stem}_{hashlib.blake2b(str(path).encode(), digest_size=6).hexdigest()}"
    if unique in sys.modules:
        return sys.modules[unique]
    if not path.is_file():
        raise FileNotFoundError(f"no such file: {path}")
    spec = importlib.util.spec_from_file_location(unique, path)
    assert spec is not None and spec.loader is not None, "the suffix is .py"
    module = importlib.util.module_from_spec(spec)
    sys.modules[unique] = module  # as `import` does: dataclasses and pickle look it up
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[unique]
        raise
    return module


def _shadowed(module_name: str) -> str:
    """A hint if the working folder has a module of that name but another one was imported."""
    if module_name.endswith(FILE):
        return ""
    top = module_name.partition(".")[0]
    file, package = Path(f"{top}{FILE}").resolve(), Path(top, f"__init__{FILE}").resolve()
    local = next((path for path in (file, package) if path.is_file()), None)
    imported = sys.modules.get(top)
    if local is None or imported is None:
        return ""
    imported_file = getattr(imported, "__file__", None)
    if imported_file is not None and Path(imported_file).resolve() == local:
        return ""
    instead = f', or write "{file.name}:Name"' if local == file else ""
    return (
        f"; {local.relative_to(Path.cwd())} in the working folder has the same name as another "
        f"module, which Python imports first; rename it{instead}"
    )


def check_class(kind: Any, protocol: type, what: str) -> None:
    """Raises unless `kind` is a class with the methods of a protocol."""
    check_is_class(kind, what)
    methods = [name for name, value in vars(protocol).items() if inspect.isfunction(value)]
    public = [name for name in methods if not name.startswith("_")]
    missing = [name for name in public if attribute(kind, name) is None]
    if missing:
        raise UserError(
            f"{what} has no {', '.join(missing[:4])}{' …' if missing[4:] else ''}; expected the "
            f"methods of gesso's {protocol.__name__}"
        )


def check_is_class(kind: Any, what: str) -> None:
    if not isinstance(kind, type):
        raise UserError(f"{what} is a {type(kind).__name__}; expected a class")
    if attribute(kind, "_is_protocol"):
        raise UserError(f"{what} is a protocol; expected a class that can be instantiated")


def attribute(kind: type, name: str) -> Any:
    """An attribute of a user's class, or None."""
    try:
        return getattr(kind, name, None)
    except Exception:  # raised by a user's metaclass
        return None
