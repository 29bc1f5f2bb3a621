"""Matrix products for a CPU with AVX-512.

A step of a few tokens does nothing but read weights, so a kernel should read memory as fast as it
can, and compute meanwhile. torch's do one or the other. Here the weight is laid out in blocks of 32
outputs, in the order in which it is read, and up to 12 tokens are multiplied at each pass over a
block, from registers; more tokens find the block in the cache.

Each output is summed over its inputs one after another, in float32, whatever stands beside it: what
a token's product is does not depend, to the last bit, on how many others there are.

Shapes: N tokens, i inputs, o outputs.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial

import torch
from torch import nn

from specbench.target import jit
from specbench.target.jit import F32, Code

_COLUMNS = 32
_MOST_ROWS = 12
# With so many tokens the CPU waits for memory between its own prefetches: ask for bytes further on.
_PREFETCHING_ROWS = 7
_PREFETCHED_BYTES = 16384
_HALVES = (0, 64)
"""Bytes at which a block's two vectors of 16 outputs begin."""


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


_FMA = "@llvm.fma.v16f32"
_DOT = "@llvm.x86.avx512bf16.dpbf16ps.512"
_PREFETCH = "declare void @llvm.prefetch.p0(ptr, i32, i32, i32)"
_TYPES = {
    torch.float32: _Type(
        group=1,
        feature="avx512f",
        group_type="float",
        lanes=F32,
        multiply_add=f"call {F32} {_FMA}({F32} {{1}}, {F32} {{2}}, {F32} {{0}})",
        out=F32,
        declare=f"declare {F32} {_FMA}({F32}, {F32}, {F32})",
    ),
    torch.bfloat16: _Type(
        group=2,
        feature="avx512bf16",
        group_type="i32",
        lanes="<32 x bfloat>",
        multiply_add=f"call {F32} {_DOT}({F32} {{0}}, <32 x bfloat> {{1}}, <32 x bfloat> {{2}})",
        out="<16 x bfloat>",
        declare=f"declare {F32} {_DOT}({F32}, <32 x bfloat>, <32 x bfloat>)",
    ),
}


def available(dtype: torch.dtype) -> bool:
    """Whether there is a kernel for a type on this CPU."""
    return dtype in _TYPES and jit.available(_TYPES[dtype].feature) and _compiles(dtype)


@cache
def _compiles(dtype: torch.dtype) -> bool:
    return jit.compiles(partial(_kernel, dtype))


class BlockedWeight:
    """A weight and bias laid out for the kernel.

    Args:
        weight: [o, i], of a type that is `available`; neither o nor i is 0.
        bias: [o], if there is one; added in float32.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.out_features, self.in_features = weight.shape
        assert weight.numel() > 0, "a weight without inputs or outputs has no blocks"
        group = _TYPES[weight.dtype].group
        padding = (0, -self.in_features % group, 0, -self.out_features % _COLUMNS)
        padded = nn.functional.pad(weight.detach(), padding)
        num_blocks, num_groups = padded.shape[0] // _COLUMNS, padded.shape[1] // group
        blocks = padded.view(num_blocks, _COLUMNS, num_groups, group).transpose(1, 2)
        # [blocks, groups, 32, inputs of a group]
        self.blocks = blocks.contiguous()
        self.bias = torch.zeros(padded.shape[0], dtype=torch.float32, device="cpu")
        if bias is not None:
            self.bias[: self.out_features] = bias.detach()

    def multiply(self, x_Ni: torch.Tensor) -> torch.Tensor:
        """[N, i] -> [N, o], rounded once to the type of the weight; no gradient goes through it.

        Raises:
            RuntimeError: the input is of another width or type than the weight, or wants a
            gradient.
        """
        num_blocks, num_groups, _, group = self.blocks.shape
        given = (x_Ni.shape[1], x_Ni.dtype, x_Ni.device.type)
        if given != (self.in_features, self.blocks.dtype, "cpu"):
            raise RuntimeError(
                "the input of a packed layer is {} wide, {}, on {}; ".format(*given)
                + f"it takes {self.in_features}, {self.blocks.dtype}, on cpu"
            )
        if x_Ni.requires_grad and torch.is_grad_enabled():
            raise RuntimeError("no gradient goes through a packed layer; load with pack=False")
        if self.in_features != num_groups * group:
            x_Ni = nn.functional.pad(x_Ni, (0, num_groups * group - self.in_features))
        x_Ni = x_Ni.contiguous()
        out_No = x_Ni.new_empty(x_Ni.shape[0], len(self.bias))
        if not len(x_Ni):
            return out_No[:, : self.out_features]
        _kernel(x_Ni.dtype)(
            self.blocks.data_ptr(),
            self.bias.data_ptr(),
            num_blocks,
            num_groups,
            x_Ni.data_ptr(),
            out_No.data_ptr(),
            len(x_Ni),
        )
        return out_No[:, : self.out_features]

    def dense(self) -> torch.Tensor:
        """The weight as a plain tensor again, [o, i]."""
        num_blocks, num_groups, _, group = self.blocks.shape
        rows = self.blocks.transpose(1, 2).reshape(num_blocks * _COLUMNS, num_groups * group)
        return rows[: self.out_features, : self.in_features]


@cache
def _kernel(dtype: torch.dtype) -> Callable[..., None]:
    """product(blocks, bias, num_blocks, num_groups, x, out, num_tokens), x and out contiguous."""
    kind = _TYPES[dtype]
    passes = [_pass(kind, rows) for rows in range(1, _MOST_ROWS + 1)]
    arguments = ("ptr", "ptr", "i64", "i64", "ptr", "ptr", "i64")
    return jit.compiled(
        "product", arguments, "\n".join([_PREFETCH, kind.declare, *passes, _product(kind)])
    )


def _pass(kind: _Type, rows: int) -> str:
    """One block's outputs for so many tokens."""
    code = Code()
    sums = [(row, half) for row in range(rows) for half in _HALVES]
    code.label("entry")
    bias = {half: code.load(F32, "%bias", half) for half in _HALVES}
    x_stride = code.value("mul i64 %groups, 4")
    x = [code.at("%x", code.value(f"mul i64 {x_stride}, {row}")) for row in range(rows)]
    code.line("br label %loop")

    code.label("loop")
    code.line("%k = phi i64 [0, %entry], [%next, %loop]")
    for row, half in sums:
        code.line(f"%sum{row}.{half} = phi {F32} [{bias[half]}, %entry], [%new{row}.{half}, %loop]")
    place = code.at("%block", code.value("mul i64 %k, 128"))
    weights = {half: code.load(kind.lanes, place, half) for half in _HALVES}
    if rows >= _PREFETCHING_ROWS:
        for half in _HALVES:
            later = code.at(place, half + _PREFETCHED_BYTES)
            # To read (0), into the second-level cache (2), as data (1).
            code.line(f"call void @llvm.prefetch.p0(ptr {later}, i32 0, i32 2, i32 1)")
    x_offset = code.value("mul i64 %k, 4")
    for row in range(rows):
        spread = code.spread(kind.group_type, code.load(kind.group_type, x[row], x_offset))
        inputs = code.value(f"bitcast <16 x {kind.group_type}> {spread} to {kind.lanes}")
        for half in _HALVES:
            product = kind.multiply_add.format(f"%sum{row}.{half}", weights[half], inputs)
            code.line(f"%new{row}.{half} = {product}")
    code.line("%next = add i64 %k, 1")
    code.line("%more = icmp slt i64 %next, %groups")
    code.line("br i1 %more, label %loop, label %done")

    code.label("done")
    for row, half in sums:
        value = f"%new{row}.{half}"
        if kind.out != F32:
            value = code.value(f"fptrunc {F32} {value} to {kind.out}")
        out = code.at("%out", code.value(f"mul i64 %stride, {row}"))
        code.store(kind.out, value, code.at(out, half // kind.group))
    code.line("ret void")
    return code.function(
        f"internal void @pass{rows}(ptr noalias %block, ptr noalias %bias, i64 %groups, "
        "ptr noalias %x, ptr noalias %out, i64 %stride) noinline"
    )


def _product(kind: _Type) -> str:
    """All blocks, for each of them all tokens, in passes of up to `_MOST_ROWS`."""
    code = Code()
    code.label("entry")
    code.line(f"%stride = mul i64 %num_blocks, {_COLUMNS * 4 // kind.group}")
    block_bytes = code.value(f"mul i64 %groups, {_COLUMNS * 4}")
    x_bytes = code.value("mul i64 %groups, 4")
    code.line("br label %next.block")

    code.label("next.block")
    code.line("%b = phi i64 [0, %entry], [%b.next, %block.done]")
    block = code.at("%blocks", code.value(f"mul i64 %b, {block_bytes}"))
    bias = code.at("%bias", code.value(f"mul i64 %b, {_COLUMNS * 4}"))
    column = code.at("%out", code.value(f"mul i64 %b, {_COLUMNS * 4 // kind.group}"))
    code.line("br label %next.pass")

    code.label("next.pass")
    code.line("%t = phi i64 [0, %next.block], [%t.next, %passed]")
    left = code.value("sub i64 %tokens, %t")
    x = code.at("%x", code.value(f"mul i64 %t, {x_bytes}"))
    out = code.at(column, code.value("mul i64 %t, %stride"))
    cases = " ".join(f"i64 {rows}, label %rows{rows}" for rows in range(1, _MOST_ROWS))
    code.line(f"switch i64 {left}, label %rows{_MOST_ROWS} [{cases}]")
    for rows in range(1, _MOST_ROWS + 1):
        code.label(f"rows{rows}")
        code.line(
            f"call void @pass{rows}(ptr {block}, ptr {bias}, i64 %groups, ptr {x}, ptr {out}, "
            "i64 %stride)"
        )
        code.line("br label %passed")
    code.label("passed")
    code.line(f"%t.next = add i64 %t, {_MOST_ROWS}")
    code.line("%more.tokens = icmp slt i64 %t.next, %tokens")
    code.line("br i1 %more.tokens, label %next.pass, label %block.done")
    code.label("block.done")
    code.line("%b.next = add i64 %b, 1")
    code.line("%more.blocks = icmp slt i64 %b.next, %num_blocks")
    code.line("br i1 %more.blocks, label %next.block, label %done")
    code.label("done")
    code.line("ret void")
    return code.function(
        "void @product(ptr %blocks, ptr %bias, i64 %num_blocks, i64 %groups, ptr %x, ptr %out, "
        "i64 %tokens)"
    )
