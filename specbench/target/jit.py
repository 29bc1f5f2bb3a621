"""Machine code that LLVM makes when it is first needed: what the CPU kernels beside this file are
written with. (By llvmlite; no compiler has to be there.)"""

import ctypes
import platform
import warnings
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch

try:
    from llvmlite import binding as llvm
except (ImportError, OSError):
    llvm = None

from specbench.messages import in_one_line

POINTER, INT, FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
_CTYPES = {"ptr": POINTER, "i64": INT, "float": FLOAT}
# The code lives as long as its engine.
_ENGINES: list[Any] = []


def available(feature: str) -> bool:
    """Whether this CPU has one of LLVM's features, and this process one thread: that is what the
    kernels run on; with more, torch's are taken."""
    return torch.get_num_threads() == 1 and has(feature)


@cache
def has(feature: str) -> bool:
    """Whether there is LLVM, and this CPU has one of its features."""
    if llvm is None or platform.machine() not in ("x86_64", "AMD64"):
        return False
    return bool(llvm.get_host_cpu_features().get(feature, False))


def compiles(kernel: Callable[[], object]) -> bool:
    """Whether a kernel can be made here; says so once if it cannot."""
    try:
        kernel()
    except RuntimeError as error:
        warnings.warn(f"no CPU kernels of our own: {in_one_line(error)}", stacklevel=2)
        return False
    return True


class Code:
    """The body of a function in LLVM's language, written line by line."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._count = 0

    def line(self, text: str) -> None:
        """An instruction without a result."""
        self.lines.append(f"  {text}")

    def value(self, text: str) -> str:
        """An instruction, and the name of its result."""
        self._count += 1
        name = f"%v{self._count}"
        self.line(f"{name} = {text}")
        return name

    def label(self, name: str) -> None:
        """The beginning of a block."""
        self.lines.append(f"{name}:")

    def at(self, pointer: str, offset: str | int) -> str:
        """The pointer so many bytes further."""
        return self.value(f"getelementptr i8, ptr {pointer}, i64 {offset}")

    def load(self, kind: str, pointer: str, offset: str | int = 0) -> str:
        """What lies so many bytes behind a pointer."""
        place = self.at(pointer, offset) if offset != 0 else pointer
        return self.value(f"load {kind}, ptr {place}, align 2")

    def store(self, kind: str, value: str, pointer: str) -> None:
        """Writes a value."""
        self.line(f"store {kind} {value}, ptr {pointer}, align 2")

    def spread(self, kind: str, scalar: str) -> str:
        """A scalar in all 16 lanes of a vector."""
        one = self.value(f"insertelement <16 x {kind}> poison, {kind} {scalar}, i32 0")
        return self.value(
            f"shufflevector <16 x {kind}> {one}, <16 x {kind}> poison, <16 x i32> zeroinitializer"
        )

    def function(self, head: str) -> str:
        """The whole function, ``define ... {head} {{ ... }}``."""
        return "\n".join([f"define {head} {{", *self.lines, "}"])


def compiled(name: str, arguments: Sequence[str], text: str) -> Callable[..., None]:
    """Compiles a module for this CPU.

    Args:
        name: the function wanted; it returns nothing.
        arguments: the types of its arguments: ``ptr``, ``i64`` or ``float``.
        text: the module, in LLVM's language.
    """
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    module = llvm.parse_assembly(text)
    module.verify()
    machine = llvm.Target.from_default_triple().create_target_machine(
        cpu=llvm.get_host_cpu_name(),
        features=llvm.get_host_cpu_features().flatten(),
        opt=3,
        jit=True,
    )
    tuning = llvm.create_pipeline_tuning_options(speed_level=3)
    # The code is in vectors, and unrolled, as it stands.
    tuning.loop_vectorization = tuning.slp_vectorization = tuning.loop_unrolling = False
    builder = llvm.create_pass_builder(machine, tuning)
    builder.getModulePassManager().run(module, builder)
    engine = llvm.create_mcjit_compiler(module, machine)
    engine.finalize_object()
    _ENGINES.append(engine)
    prototype: Any = ctypes.CFUNCTYPE(None, *(_CTYPES[kind] for kind in arguments))
    function: Callable[..., None] = prototype(engine.get_function_address(name))
    return function
