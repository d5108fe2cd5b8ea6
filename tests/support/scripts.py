"""A script under tools/ as a module: it is in no package."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType


def load_script(path: Path) -> ModuleType:
    specification = importlib.util.spec_from_file_location(path.stem, path)
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    # Dataclasses look their module up by its name.
    sys.modules[path.stem] = module
    specification.loader.exec_module(module)
    return module
