"""Hide options of the library, which an editable installation would find outside a copy."""

import sys
from collections.abc import Collection
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, NoReturn

PREFIX = "hf_speculate.options."


class Placeholder:
    """Stand-in for a name imported from an option; using it raises the error of the import."""

    def __init__(self, module: str):
        object.__setattr__(self, "_module", module)

    def _fail(self, *_: Any, **__: Any) -> NoReturn:
        module = object.__getattribute__(self, "_module")
        raise ModuleNotFoundError(f"No module named {module!r}", name=module)

    __call__ = __getattr__ = __getitem__ = __iter__ = __len__ = _fail


class Placeholders(Loader):
    """Loader for modules whose names are placeholders."""

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return ModuleType(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        def placeholder(name: str) -> Placeholder:
            if name.startswith("__"):
                raise AttributeError(name)
            return Placeholder(module.__name__)

        module.__dict__["__getattr__"] = placeholder


class Missing(MetaPathFinder):
    """Finder that hides the modules of the named options and stops the search."""

    def __init__(self, options: Collection[str] | None):
        self.options = options  # None for all options
        self.gives_placeholders = False  # load placeholders instead of raising an error

    def find_spec(self, fullname: str, *_: Any) -> ModuleSpec | None:
        option = fullname.removeprefix(PREFIX).partition(".")[0]
        is_package = self.options is None and fullname == PREFIX.rstrip(".")
        is_missing = fullname.startswith(PREFIX) and (
            self.options is None or option in self.options
        )
        if not (is_missing or is_package):
            return None
        if self.gives_placeholders:
            return ModuleSpec(fullname, Placeholders(), is_package=True)
        raise ModuleNotFoundError(f"No module named {fullname!r}", name=fullname)

    def fail(self) -> None:
        """Stop loading placeholders, and forget the modules that contain them."""
        self.gives_placeholders = False
        for name in [name for name in sys.modules if f"{name}.".startswith(PREFIX)]:
            del sys.modules[name]


def hide(options: Collection[str] | None) -> Missing:
    """Hide the modules of these options, or of all options if None; none may be imported yet."""
    loaded = [name for name in sys.modules if name.startswith(PREFIX)]
    assert not loaded, loaded
    finder = Missing(options)
    sys.meta_path.insert(0, finder)
    return finder
