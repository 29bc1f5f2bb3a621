"""Matrix products for a CPU with AVX-512, compiled when first used.

A step of a few tokens does nothing but read weights, so a kernel should read memory as fast as it
can, and compute meanwhile. torch's do one or the other. Here the weight is laid out in blocks of 32
outputs, in the order in which it is read, and up to 12 tokens are multiplied at each pass over a
block, from registers; more tokens find the block in the cache. LLVM makes the code (llvmlite; no
compiler is needed).

Each output is summed over its inputs one after another, in float32, whatever stands beside it: what
a token's product is does not depend, to the last bit, on how many others there are.

Shapes: N tokens, i inputs, o outputs.
"""

import ctypes
import platform
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from llvmlite import binding as llvm
from torch import nn

_COLUMNS = 32
_MOST_ROWS = 12
# With so many tokens the CPU waits for memory between its own prefetches: ask for bytes further on.
_PREFETCHING_ROWS = 7
_PREFETCHED_BYTES = 16384


@dataclass(frozen=True)
class _Type:
    """How the kernel for a type of weights computes.

    Args:
        group: inputs that one instruction multiplies and adds up, for each of 16 outputs.
        feature: what the CPU must have.
        group_type: the type of such a group of a token's inputs.
        lanes: the type of a vector of 16 groups.
        multiply_add: the instruction, with {0} the sums, {1} the weights and {2} the inputs.
        out: the type of 16 outputs, narrowed from float.
        declare: what the instruction must be declared as.
    """

    group: int
    feature: str
    group_type: str
    lanes: str
    multiply_add: str
    out: str
    declare: str


_F32 = "<16 x float>"
_FMA = "@llvm.fma.v16f32"
_DOT = "@llvm.x86.avx512bf16.dpbf16ps.512"
_PREFETCH = "declare void @llvm.prefetch.p0(ptr, i32, i32, i32)"
_TYPES = {
    torch.float32: _Type(
        group=1,
        feature="avx512f",
        group_type="float",
        lanes=_F32,
        multiply_add=f"call {_F32} {_FMA}({_F32} {{1}}, {_F32} {{2}}, {_F32} {{0}})",
        out=_F32,
        declare=f"declare {_F32} {_FMA}({_F32}, {_F32}, {_F32})",
    ),
    torch.bfloat16: _Type(
        group=2,
        feature="avx512bf16",
        group_type="i32",
        lanes="<32 x bfloat>",
        multiply_add=f"call {_F32} {_DOT}({_F32} {{0}}, <32 x bfloat> {{1}}, <32 x bfloat> {{2}})",
        out="<16 x bfloat>",
        declare=f"declare {_F32} {_DOT}({_F32}, <32 x bfloat>, <32 x bfloat>)",
    ),
}


def available(dtype: torch.dtype) -> bool:
    """Whether there is a kernel for a type on this CPU. It runs on one thread; with more, torch's
    are taken."""
    return (
        dtype in _TYPES
        and torch.get_num_threads() == 1
        and platform.machine() in ("x86_64", "AMD64")
        and bool(llvm.get_host_cpu_features().get(_TYPES[dtype].feature, False))
    )


class BlockedWeight:
    """A weight and bias laid out for the kernel.

    Args:
        weight: [o, i], of a type that is `available`.
        bias: [o], if there is one; added in float32.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.out_features, self.in_features = weight.shape
        group = _TYPES[weight.dtype].group
        padding = (0, -self.in_features % group, 0, -self.out_features % _COLUMNS)
        padded = nn.functional.pad(weight.detach(), padding)
        num_blocks, num_groups = padded.shape[0] // _COLUMNS, padded.shape[1] // group
        blocks = padded.view(num_blocks, _COLUMNS, num_groups, group).transpose(1, 2)
        # [blocks, groups, 32, inputs of a group]
        self.blocks = blocks.contiguous()
        self.bias = torch.zeros(padded.shape[0])
        if bias is not None:
            self.bias[: self.out_features] = bias.detach()
        self._kernel = _kernel(weight.dtype)
        # The addresses do not change as long as the tensors live.
        self._fixed = (self.blocks.data_ptr(), self.bias.data_ptr(), num_blocks, num_groups)

    def multiply(self, x_Ni: torch.Tensor) -> torch.Tensor:
        """[N, i] -> [N, o], rounded once to the type of the weight."""
        num_groups, group = self.blocks.shape[1], self.blocks.shape[3]
        if self.in_features != num_groups * group:
            x_Ni = nn.functional.pad(x_Ni, (0, num_groups * group - self.in_features))
        x_Ni = x_Ni.contiguous()
        out_No = x_Ni.new_empty(x_Ni.shape[0], len(self.bias))
        self._kernel(*self._fixed, x_Ni.data_ptr(), out_No.data_ptr(), x_Ni.shape[0])
        return out_No[:, : self.out_features]

    def dense(self) -> torch.Tensor:
        """The weight as a plain tensor again, [o, i]."""
        num_blocks, num_groups, _, group = self.blocks.shape
        rows = self.blocks.transpose(1, 2).reshape(num_blocks * _COLUMNS, num_groups * group)
        return rows[: self.out_features, : self.in_features]


@cache
def _kernel(dtype: torch.dtype) -> Callable[..., None]:
    """void(blocks, bias, num_blocks, num_groups, x, out, num_tokens), for contiguous x and out."""
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    kind = _TYPES[dtype]
    passes = [_pass(kind, rows) for rows in range(1, _MOST_ROWS + 1)]
    module = llvm.parse_assembly("\n".join([_PREFETCH, kind.declare, *passes, _product(kind)]))
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
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    prototype = ctypes.CFUNCTYPE(None, pointer, pointer, number, number, pointer, pointer, number)
    return prototype(engine.get_function_address("product"))


# The code lives as long as its engine.
_ENGINES: list[llvm.ExecutionEngine] = []


def _pass(kind: _Type, rows: int) -> str:
    """One block's outputs for so many tokens: `pass{rows}(block, bias, groups, x, out, the bytes
    between tokens in out)`."""
    size = 4 // kind.group
    sums = [(row, half) for row in range(rows) for half in (0, 1)]
    lines = [
        f"define internal void @pass{rows}(ptr noalias %block, ptr noalias %bias, i64 %groups, "
        "ptr noalias %x, ptr noalias %out, i64 %stride) noinline {",
        "entry:",
        "  %x_stride = mul i64 %groups, 4",
    ]
    for half in (0, 1):
        lines += [
            f"  %bias{half}.at = getelementptr i8, ptr %bias, i64 {64 * half}",
            f"  %bias{half} = load {_F32}, ptr %bias{half}.at, align 4",
        ]
    for row in range(rows):
        lines += [
            f"  %x{row}.skip = mul i64 %x_stride, {row}",
            f"  %x{row}.at = getelementptr i8, ptr %x, i64 %x{row}.skip",
        ]
    lines += ["  br label %loop", "loop:", "  %k = phi i64 [0, %entry], [%next, %loop]"]
    lines += [
        f"  %sum{row}.{half} = phi {_F32} [%bias{half}, %entry], [%new{row}.{half}, %loop]"
        for row, half in sums
    ]
    lines += ["  %block.skip = mul i64 %k, 128", "  %x.skip = mul i64 %k, 4"]
    for half in (0, 1):
        lines += [
            f"  %half{half} = add i64 %block.skip, {64 * half}",
            f"  %w{half}.at = getelementptr i8, ptr %block, i64 %half{half}",
            f"  %w{half} = load {kind.lanes}, ptr %w{half}.at, align 4",
        ]
        if rows >= _PREFETCHING_ROWS:
            # To read (0), into the second-level cache (2), as data (1).
            lines += [
                f"  %later{half} = getelementptr i8, ptr %w{half}.at, i64 {_PREFETCHED_BYTES}",
                f"  call void @llvm.prefetch.p0(ptr %later{half}, i32 0, i32 2, i32 1)",
            ]
    spread = f"<16 x {kind.group_type}>"
    for row in range(rows):
        lines += [
            f"  %g{row}.at = getelementptr i8, ptr %x{row}.at, i64 %x.skip",
            f"  %g{row} = load {kind.group_type}, ptr %g{row}.at, align 4",
            f"  %g{row}.one = insertelement {spread} poison, {kind.group_type} %g{row}, i32 0",
            f"  %g{row}.all = shufflevector {spread} %g{row}.one, {spread} poison, "
            "<16 x i32> zeroinitializer",
            f"  %v{row} = bitcast {spread} %g{row}.all to {kind.lanes}",
        ]
    lines += [
        f"  %new{row}.{half} = "
        + kind.multiply_add.format(f"%sum{row}.{half}", f"%w{half}", f"%v{row}")
        for row, half in sums
    ]
    lines += [
        "  %next = add i64 %k, 1",
        "  %more = icmp slt i64 %next, %groups",
        "  br i1 %more, label %loop, label %done",
        "done:",
    ]
    for row, half in sums:
        name, value = f"{row}.{half}", f"%new{row}.{half}"
        if kind.out != _F32:
            lines.append(f"  %narrow{name} = fptrunc {_F32} {value} to {kind.out}")
            value = f"%narrow{name}"
        lines += [
            f"  %out{name}.row = mul i64 %stride, {row}",
            f"  %out{name}.skip = add i64 %out{name}.row, {16 * size * half}",
            f"  %out{name}.at = getelementptr i8, ptr %out, i64 %out{name}.skip",
            f"  store {kind.out} {value}, ptr %out{name}.at, align 2",
        ]
    return "\n".join([*lines, "  ret void", "}"])


def _product(kind: _Type) -> str:
    """All blocks, for each of them all tokens, in passes of up to `_MOST_ROWS`."""
    size = 4 // kind.group
    arguments = "ptr %block, ptr %bias.at, i64 %groups, ptr %x.at, ptr %out.at, i64 %stride"
    cases = "\n".join(f"    i64 {rows}, label %rows{rows}" for rows in range(1, _MOST_ROWS))
    calls = "\n".join(
        f"rows{rows}:\n  call void @pass{rows}({arguments})\n  br label %passed"
        for rows in range(1, _MOST_ROWS + 1)
    )
    return f"""
define void @product(
    ptr %blocks, ptr %bias, i64 %num_blocks, i64 %groups, ptr %x, ptr %out, i64 %tokens
) {{
entry:
  %stride = mul i64 %num_blocks, {_COLUMNS * size}
  %block.bytes = mul i64 %groups, {_COLUMNS * 4}
  %x.bytes = mul i64 %groups, 4
  br label %next.block
next.block:
  %b = phi i64 [0, %entry], [%b.next, %block.done]
  %block.skip = mul i64 %b, %block.bytes
  %block = getelementptr i8, ptr %blocks, i64 %block.skip
  %bias.skip = mul i64 %b, {_COLUMNS * 4}
  %bias.at = getelementptr i8, ptr %bias, i64 %bias.skip
  %out.column = mul i64 %b, {_COLUMNS * size}
  br label %next.pass
next.pass:
  %t = phi i64 [0, %next.block], [%t.next, %passed]
  %left = sub i64 %tokens, %t
  %x.skip = mul i64 %t, %x.bytes
  %x.at = getelementptr i8, ptr %x, i64 %x.skip
  %out.row = mul i64 %t, %stride
  %out.skip = add i64 %out.row, %out.column
  %out.at = getelementptr i8, ptr %out, i64 %out.skip
  switch i64 %left, label %rows{_MOST_ROWS} [
{cases}
  ]
{calls}
passed:
  %t.next = add i64 %t, {_MOST_ROWS}
  %more.tokens = icmp slt i64 %t.next, %tokens
  br i1 %more.tokens, label %next.pass, label %block.done
block.done:
  %b.next = add i64 %b, 1
  %more.blocks = icmp slt i64 %b.next, %num_blocks
  br i1 %more.blocks, label %next.block, label %done
done:
  ret void
}}"""
