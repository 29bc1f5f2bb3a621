"""Machine code that LLVM makes when it is first needed: what the CPU kernels beside this file are
written with. (By llvmlite; no compiler has to be there.)"""

import ctypes
import platform
import struct
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
LANES = 16
"""Of a vector of float32."""
F32, I32 = f"<{LANES} x float>", f"<{LANES} x i32>"
DECLARED = f"""
declare {F32} @llvm.fma.v16f32({F32}, {F32}, {F32})
declare {F32} @llvm.rint.v16f32({F32})
"""
"""What `Code.fma` and `Code.exp` call."""
# e^x = 2^n e^r with n = round(x / ln 2); e^r by its Taylor series, which for |r| <= ln(2) / 2 is
# right to the last bit of float32 but one.
_LOG2_E = 1.4426950408889634
_LN2_HIGH, _LN2_LOW = 0.693145751953125, 1.42860677e-06
_TAYLOR = (1 / 5040, 1 / 720, 1 / 120, 1 / 24, 1 / 6, 0.5, 1.0, 1.0)
_LEAST_EXPONENT = -87.0
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

    def constant(self, number: float) -> str:
        """A number in all 16 lanes."""
        # As LLVM wants it: the float's value in the bits of a double.
        bits = struct.pack(">d", struct.unpack("f", struct.pack("f", number))[0]).hex()
        return self.spread("float", f"0x{bits}")

    def fma(self, a: str, b: str, c: str) -> str:
        """a b + c, rounded once."""
        return self.value(f"call {F32} @llvm.fma.v16f32({F32} {a}, {F32} {b}, {F32} {c})")

    def exp(self, x: str) -> str:
        """e^x for x <= 0; exactly 0 below e^-87."""
        n = self.value(
            f"call {F32} @llvm.rint.v16f32({F32} "
            f"{self.value(f'fmul {F32} {x}, {self.constant(_LOG2_E)}')})"
        )
        r = self.fma(n, self.constant(-_LN2_HIGH), x)
        r = self.fma(n, self.constant(-_LN2_LOW), r)
        power = self.constant(_TAYLOR[0])
        for coefficient in _TAYLOR[1:]:
            power = self.fma(power, r, self.constant(coefficient))
        whole = self.value(f"fptosi {F32} {n} to {I32}")
        shifted = self.value(f"shl {I32} {whole}, {self.spread('i32', '23')}")
        bits = self.value(f"add {I32} {self.value(f'bitcast {F32} {power} to {I32}')}, {shifted}")
        result = self.value(f"bitcast {I32} {bits} to {F32}")
        tiny = self.value(f"fcmp olt {F32} {x}, {self.constant(_LEAST_EXPONENT)}")
        return self.value(f"select <16 x i1> {tiny}, {F32} zeroinitializer, {F32} {result}")

    def again(self, index: str, step: int, bound: str, block: str, done: str) -> None:
        """The end of a block that repeats while ``%index`` + step is below a bound."""
        self.line(f"%{index}.next = add i64 %{index}, {step}")
        self.line(f"%{index}.more = icmp slt i64 %{index}.next, {bound}")
        self.line(f"br i1 %{index}.more, label %{block}, label %{done}")

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
