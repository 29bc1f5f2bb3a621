"""What lies between a decoder layer's products, each in one pass, for a CPU with AVX-512.

Of a step of few tokens, torch's many small operations take a sixth. These round where the modeling
code does; a norm's squares are summed in another order. No row's numbers depend on the others.

Shapes: T rows, w width, H heads, D head dimension.
"""

from collections.abc import Callable
from functools import cache

import torch

from specbench.target import jit
from specbench.target.jit import DECLARED, F32, LANES, Code

FEATURES = {torch.float32: "avx512f", torch.bfloat16: "avx512bf16"}
_HALF = f"<{LANES} x bfloat>"


def available(dtype: torch.dtype, *widths: int) -> bool:
    """Whether there are kernels for a type, and for rows of these widths, on this CPU."""
    return (
        dtype in FEATURES
        and all(width % LANES == 0 for width in widths)
        and jit.available(FEATURES[dtype])
        and _compiles(dtype)
    )


@cache
def _compiles(dtype: torch.dtype) -> bool:
    return jit.compiles(lambda: [make(dtype) for make in (_norm, _gate, _rotate)])


def rms_norm(x: torch.Tensor, weight_w: torch.Tensor, eps: float) -> torch.Tensor:
    """weight x / sqrt(mean of x^2 + eps) over the last dimension; [..., w] -> the same."""
    x, width = x.contiguous(), x.shape[-1]
    assert (weight_w.shape, weight_w.stride(), weight_w.dtype) == ((width,), (1,), x.dtype)
    out = torch.empty_like(x)
    if x.numel():
        pointers = x.data_ptr(), weight_w.data_ptr(), out.data_ptr()
        _norm(x.dtype)(*pointers, x.numel() // width, width, width, eps)
    return out


def gated(gate_up_Tw: torch.Tensor) -> torch.Tensor:
    """silu(gate) up, [T, 2 w] -> [T, w]; rows may lie apart."""
    rows, width = gate_up_Tw.shape[0], gate_up_Tw.shape[1] // 2
    assert gate_up_Tw.stride(1) == 1
    out_Tw = gate_up_Tw.new_empty(rows, width)
    if rows:
        pointers = gate_up_Tw.data_ptr(), out_Tw.data_ptr()
        _gate(gate_up_Tw.dtype)(*pointers, rows, gate_up_Tw.stride(0), width)
    return out_Tw


def rotate(heads_THD: torch.Tensor, cos_TD: torch.Tensor, sin_TD: torch.Tensor) -> None:
    """Rotates the heads of each row to its position, in place: x cos + (-x2, x1) sin, with x1 and
    x2 the halves of x.

    A row's heads stand one behind the other; rows may lie apart. Cosines and sines are contiguous;
    the first half of them is read.
    """
    rows, num_heads, dim = heads_THD.shape
    assert heads_THD.stride()[1:] == (dim, 1) and heads_THD.dtype == cos_TD.dtype == sin_TD.dtype
    assert cos_TD.shape == sin_TD.shape == (rows, dim)
    assert cos_TD.is_contiguous() and sin_TD.is_contiguous()
    if rows:
        pointers = heads_THD.data_ptr(), cos_TD.data_ptr(), sin_TD.data_ptr()
        _rotate(heads_THD.dtype)(*pointers, rows, heads_THD.stride(0), num_heads, dim)


class Numbers:
    """16 numbers of a type in memory; float32 in registers."""

    def __init__(self, code: Code, dtype: torch.dtype) -> None:
        self.code, self.size, self.wide = code, dtype.itemsize, dtype == torch.float32

    def at(self, pointer: str, index: str) -> str:
        """The pointer so many numbers further."""
        return self.code.at(pointer, self.code.value(f"mul i64 {index}, {self.size}"))

    def load(self, pointer: str) -> str:
        """Widened."""
        if self.wide:
            return self.code.load(F32, pointer)
        return self.code.value(f"fpext {_HALF} {self.code.load(_HALF, pointer)} to {F32}")

    def rounded(self, value: str) -> str:
        """Rounded to the type, and widened again."""
        if self.wide:
            return value
        short = self.code.value(f"fptrunc {F32} {value} to {_HALF}")
        return self.code.value(f"fpext {_HALF} {short} to {F32}")

    def store(self, value: str, pointer: str) -> None:
        """Rounded to the type."""
        if self.wide:
            return self.code.store(F32, value, pointer)
        short = self.code.value(f"fptrunc {F32} {value} to {_HALF}")
        return self.code.store(_HALF, short, pointer)

    def store_lowest(self, pointer: str) -> None:
        """Minus infinity, in one place."""
        if self.wide:
            return self.code.store("float", "0xFFF0000000000000", pointer)
        return self.code.store("bfloat", "0xRFF80", pointer)


@cache
def _norm(dtype: torch.dtype) -> Callable[..., None]:
    """norm(x, weight, out, rows, width, width again, eps)"""
    code = Code()
    numbers = Numbers(code, dtype)
    code.label("entry")
    code.line("br label %row")
    code.label("row")
    code.line("%r = phi i64 [0, %entry], [%r.next, %row.done]")
    first = code.value("mul i64 %r, %width")
    x, out = numbers.at("%x", first), numbers.at("%out", first)
    code.line("br label %square")

    code.label("square")
    code.line("%i = phi i64 [0, %row], [%i.next, %square]")
    code.line(f"%sum = phi {F32} [zeroinitializer, %row], [%sum.next, %square]")
    value = numbers.load(numbers.at(x, "%i"))
    code.line(f"%sum.next = call {F32} @llvm.fma.v16f32({F32} {value}, {F32} {value}, {F32} %sum)")
    code.again("i", LANES, "%width", "square", "scale")

    code.label("scale")
    total = code.value(
        f"call reassoc float @llvm.vector.reduce.fadd.v16f32(float 0.0, {F32} %sum.next)"
    )
    mean = code.value(f"fdiv float {total}, %floats")
    root = code.value(f"call float @llvm.sqrt.f32(float {code.value(f'fadd float {mean}, %eps')})")
    scale = code.spread("float", code.value(f"fdiv float 1.0, {root}"))
    code.line("br label %write")

    code.label("write")
    code.line("%j = phi i64 [0, %scale], [%j.next, %write]")
    value = numbers.load(numbers.at(x, "%j"))
    value = numbers.rounded(code.value(f"fmul {F32} {value}, {scale}"))
    weight = numbers.load(numbers.at("%weight", "%j"))
    numbers.store(code.value(f"fmul {F32} {weight}, {value}"), numbers.at(out, "%j"))
    code.again("j", LANES, "%width", "write", "row.done")
    code.label("row.done")
    _next_row(code)
    declared = f"""
declare float @llvm.vector.reduce.fadd.v16f32(float, {F32})
declare float @llvm.sqrt.f32(float)
"""
    head = (
        "void @norm(ptr %x, ptr %weight, ptr %out, i64 %rows, i64 %width, float %floats, "
        "float %eps)"
    )
    arguments = ("ptr", "ptr", "ptr", "i64", "i64", "float", "float")
    return jit.compiled("norm", arguments, DECLARED + declared + code.function(head))


@cache
def _gate(dtype: torch.dtype) -> Callable[..., None]:
    """gate(gate and up, out, rows, stride of rows, width)"""
    code = Code()
    numbers = Numbers(code, dtype)
    code.label("entry")
    code.line("br label %row")
    code.label("row")
    code.line("%r = phi i64 [0, %entry], [%r.next, %row.done]")
    gate = numbers.at("%gate", code.value("mul i64 %r, %stride"))
    up = numbers.at(gate, "%width")
    out = numbers.at("%out", code.value("mul i64 %r, %width"))
    code.line("br label %write")

    code.label("write")
    code.line("%i = phi i64 [0, %row], [%i.next, %write]")
    x = numbers.load(numbers.at(gate, "%i"))
    size = code.value(f"call {F32} @llvm.fabs.v16f32({F32} {x})")
    power = code.exp(code.value(f"fneg {F32} {size}"))
    # 1 / (1 + e^-x), or for negative x, whose e^-x may overflow, e^x / (1 + e^x).
    one = code.constant(1.0)
    negative = code.value(f"fcmp olt {F32} {x}, zeroinitializer")
    share = code.value(f"select <16 x i1> {negative}, {F32} {power}, {F32} {one}")
    whole = code.value(f"fadd {F32} {one}, {power}")
    silu = code.value(f"fdiv {F32} {code.value(f'fmul {F32} {x}, {share}')}, {whole}")
    value = numbers.load(numbers.at(up, "%i"))
    numbers.store(code.value(f"fmul {F32} {numbers.rounded(silu)}, {value}"), numbers.at(out, "%i"))
    code.again("i", LANES, "%width", "write", "row.done")
    code.label("row.done")
    _next_row(code)
    declared = f"declare {F32} @llvm.fabs.v16f32({F32})\n"
    head = "void @gate(ptr %gate, ptr %out, i64 %rows, i64 %stride, i64 %width)"
    arguments = ("ptr", "ptr", "i64", "i64", "i64")
    return jit.compiled("gate", arguments, DECLARED + declared + code.function(head))


@cache
def _rotate(dtype: torch.dtype) -> Callable[..., None]:
    """rotate(heads, cos, sin, rows, stride of rows, heads of a row, dimension)"""
    code = Code()
    numbers = Numbers(code, dtype)
    code.label("entry")
    half = code.value("sdiv i64 %dim, 2")
    code.line("br label %row")
    code.label("row")
    code.line("%r = phi i64 [0, %entry], [%r.next, %row.done]")
    row = numbers.at("%x", code.value("mul i64 %r, %stride"))
    first = code.value("mul i64 %r, %dim")
    cosines, sines = numbers.at("%cos", first), numbers.at("%sin", first)
    code.line("br label %head")
    code.label("head")
    code.line("%h = phi i64 [0, %row], [%h.next, %head.done]")
    head = numbers.at(row, code.value("mul i64 %h, %dim"))
    code.line("br label %turn")

    code.label("turn")
    code.line("%i = phi i64 [0, %head], [%i.next, %turn]")
    places = [numbers.at(head, "%i")]
    places.append(numbers.at(places[0], half))
    x1, x2 = map(numbers.load, places)
    cos, sin = (numbers.load(numbers.at(table, "%i")) for table in (cosines, sines))

    def product(a: str, b: str) -> str:
        return numbers.rounded(code.value(f"fmul {F32} {a}, {b}"))

    turned = (
        code.value(f"fsub {F32} {product(x1, cos)}, {product(x2, sin)}"),
        code.value(f"fadd {F32} {product(x2, cos)}, {product(x1, sin)}"),
    )
    for value, place in zip(turned, places, strict=True):
        numbers.store(value, place)
    code.again("i", LANES, half, "turn", "head.done")
    code.label("head.done")
    code.again("h", 1, "%heads", "head", "row.done")
    code.label("row.done")
    _next_row(code)
    signature = (
        "void @rotate(ptr %x, ptr %cos, ptr %sin, i64 %rows, i64 %stride, i64 %heads, i64 %dim)"
    )
    arguments = ("ptr", "ptr", "ptr", "i64", "i64", "i64", "i64")
    return jit.compiled("rotate", arguments, code.function(signature))


def _next_row(code: Code) -> None:
    code.again("r", 1, "%rows", "row", "done")
    code.label("done")
    code.line("ret void")
