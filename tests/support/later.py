"""Modules that are imported when they are first used: every test process collects all files, and torch, transformers
and optimum take it 10 s of processor time, but those who need them run in one process (see tests/conftest.py). Clients
of the server take a second each."""

import importlib
from types import ModuleType


class Later(ModuleType):
    """Stands for the module of this name, to read from; patch that by its name."""

    def __getattr__(self, name: str):
        if name.startswith("_"):  # pytest looks for its own marks
            raise AttributeError(name)
        return getattr(importlib.import_module(self.__name__), name)


torch = Later("torch")
transformers = Later("transformers")
openai = Later("openai")
schemathesis = Later("schemathesis")
