"""Discovery of the figures and claims that the modules of a folder define."""

import importlib
import pkgutil
from operator import attrgetter
from types import ModuleType


def discovered[Kind](folder: ModuleType, kind: type[Kind]) -> list[Kind]:
    """Return every instance of `kind` that a module of the folder defines, by its place."""
    names = [module.name for module in pkgutil.iter_modules(folder.__path__)]
    modules = [importlib.import_module(f"{folder.__name__}.{name}") for name in names]
    values = {id(value): value for module in modules for value in vars(module).values()}.values()
    return sorted((each for each in values if isinstance(each, kind)), key=attrgetter("place"))
