"""Modules that are imported on first use. Every test process collects all files, and importing torch, transformers and
optimum takes 10 s of processor time, but the tests that need them run in one process (see tests/conftest.py). Clients
of the server take a second each."""

import importlib
from types import ModuleType


class Later(ModuleType):
    """A proxy of the module of this name, to read from; patch the module itself by its name."""

    def __getattr__(self, name: str):
        if name.startswith("_"):  # pytest looks for its own marks
            raise AttributeError(name)
        return getattr(importlib.import_module(self.__name__), name)


torch = Later("torch")
transformers = Later("transformers")
openai = Later("openai")
schemathesis = Later("schemathesis")
