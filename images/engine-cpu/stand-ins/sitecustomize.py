"""Stand-ins for ``triton`` and ``torchvision``, which SGLang imports unconditionally and never uses on a CPU.

Python imports ``sitecustomize`` by itself at start when this folder is on PYTHONPATH, so spawned children get it too.
Every attribute of a stand-in is again a stand-in; used as a decorator it returns the function unchanged.
"""

import enum
import importlib.abc
import importlib.machinery
import sys
import types

_VERSIONS = {"triton": "3.6.0", "torchvision": "0.28.0"}
_INTERPOLATIONS = ("NEAREST", "NEAREST_EXACT", "BILINEAR", "BICUBIC", "BOX", "HAMMING", "LANCZOS")


def _class(module, name):
    members = {
        "__module__": module,
        "__init__": lambda self, *args, **kwargs: None,
        "__class_getitem__": classmethod(lambda cls, item: cls),
    }
    return type(name, (), members)


class _StandIn(types.ModuleType):
    def __init__(self, name):
        super().__init__(name)
        self.__path__ = []
        self.__file__ = __file__
        self.__version__ = _VERSIONS[name.partition(".")[0]]

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        full = f"{self.__name__}.{name}"
        if full == "triton.backends.backends":  # torch looks its device names up in this dictionary
            value = {}
        elif name == "InterpolationMode":  # transformers reads the enum's members
            value = enum.Enum(name, {member: member.lower() for member in _INTERPOLATIONS})
        elif name[:1].isupper():  # used as base class or annotation
            value = _class(self.__name__, name)
        else:
            value = _StandIn(full)
        setattr(self, name, value)
        return value

    def __call__(self, *args, **kwargs):
        if len(args) == 1 and callable(args[0]) and not kwargs:
            return args[0]  # @triton.jit
        return lambda function: function  # @triton.jit(...)


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in _VERSIONS:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        return _StandIn(spec.name)

    def exec_module(self, module):
        """Nothing to run: the module makes its attributes when they are asked for."""


sys.meta_path.insert(0, _Finder())

import sglang_cpu_patches  # noqa: E402

sglang_cpu_patches.apply()
