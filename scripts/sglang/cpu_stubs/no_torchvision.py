"""Lets SGLang start without torchvision, from which it imports names that text never uses.

scripts/sglang/install_cpu.sh has Python import this module at its start.
"""

import importlib.abc
import importlib.machinery
import sys
import types


class Name(type):
    """A class that stands for any name in torchvision, and for any attribute of it."""

    def __getattr__(cls, name: str):
        if name.startswith("__"):
            raise AttributeError(name)
        return Name(name, (), {})


class Empty(types.ModuleType):
    __version__ = "0.0.0"

    def __getattr__(self, name: str):
        if name.startswith("__"):
            raise AttributeError(name)
        return Name(name, (), {})


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds torchvision and all its modules, each as an Empty one."""

    def find_spec(self, name: str, path=None, target=None):
        if name.split(".")[0] != "torchvision":
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec):
        return Empty(spec.name)

    def exec_module(self, module) -> None:
        """Empty has all there is."""


sys.meta_path.append(Finder())
