"""The largest scores of each row, for a CPU with AVX-512: in two passes at the speed of the cache,
where torch's `topk` sorts.

Blocks of 64 scores are known by their largest; each pick looks for the best block and in it for the
score. Shapes: T rows, D scores, K picks.
"""

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch

from specbench.target import jit
from specbench.target.elementwise import FEATURES, Numbers
from specbench.target.jit import DECLARED, F32, I32, LANES, Code

_VECTORS = 4
_BLOCK = _VECTORS * LANES
_COUNTED = "<" + ", ".join(f"i32 {lane}" for lane in range(LANES)) + ">"
_TOP = 2**31 - 1


class Largest(NamedTuple):
    """Of each row the K largest scores in descending order, [T, K] float32, of equal ones the
    first; their indices; and the logarithm of the sum of all e^score, [T, 1]."""

    values: torch.Tensor
    indices: torch.Tensor
    log_sum: torch.Tensor


def available(dtype: torch.dtype, num_scores: int, num_picks: int) -> bool:
    """Whether there is a kernel for so many scores of a type on this CPU."""
    return (
        dtype in FEATURES
        and num_scores % _BLOCK == 0
        and 0 < num_picks <= num_scores
        and jit.available(FEATURES[dtype])
        and _compiles(dtype)
    )


@cache
def _compiles(dtype: torch.dtype) -> bool:
    return jit.compiles(lambda: _kernel(dtype))


def largest(scores_TD: torch.Tensor, num_picks: int) -> Largest:
    """Picks from contiguous scores of a kind that is `available`, which are lost: a score that was
    picked is overwritten."""
    rows, num_scores = scores_TD.shape
    assert scores_TD.is_contiguous()
    values = torch.empty(rows, num_picks, dtype=torch.float32, device="cpu")
    indices = torch.empty(rows, num_picks, dtype=torch.int64, device="cpu")
    # By row, the largest score and the sum of e^(score - largest).
    sums = torch.empty(rows, 2, dtype=torch.float32, device="cpu")
    num_blocks = num_scores // _BLOCK
    num_places = num_blocks + -num_blocks % LANES
    blocks = torch.full((num_places,), -torch.inf, dtype=torch.float32, device="cpu")
    if rows:
        pointers = (x.data_ptr() for x in (scores_TD, values, indices, sums, blocks))
        _kernel(scores_TD.dtype)(*pointers, rows, num_scores, num_picks)
    return Largest(values, indices, sums[:, :1] + sums[:, 1:].log())


@cache
def _kernel(dtype: torch.dtype) -> Callable[..., None]:
    """largest(scores, values, indices, sums, blocks, rows, scores of a row, picks)"""
    code = Code()
    numbers = Numbers(code, dtype)
    code.label("entry")
    num_blocks = code.value(f"udiv i64 %width, {_BLOCK}")
    lowest = code.constant(-float("inf"))
    code.line("br label %row")
    code.label("row")
    code.line("%r = phi i64 [0, %entry], [%r.next, %row.done]")
    x = numbers.at("%x", code.value("mul i64 %r, %width"))
    code.line("br label %block")

    code.label("block")
    code.line("%b = phi i64 [0, %row], [%b.next, %block]")
    code.line(f"%best = phi {F32} [{lowest}, %row], [%best.next, %block]")
    place = numbers.at(x, code.value(f"mul i64 %b, {_BLOCK}"))
    high = _maximum(
        code, [numbers.load(numbers.at(place, f"{i * LANES}")) for i in range(_VECTORS)]
    )
    code.store("float", _reduced(code, high), code.at("%blocks", code.value("mul i64 %b, 4")))
    code.line(f"%best.next = {_larger(code, high, '%best')}")
    code.again("b", 1, num_blocks, "block", "maximum")

    code.label("maximum")
    maximum = _reduced(code, "%best.next")
    spread = code.spread("float", maximum)
    code.line("br label %sum")
    code.label("sum")
    code.line("%i = phi i64 [0, %maximum], [%i.next, %sum]")
    code.line(f"%mass = phi {F32} [zeroinitializer, %maximum], [%mass.next, %sum]")
    apart = code.value(f"fsub {F32} {numbers.load(numbers.at(x, '%i'))}, {spread}")
    code.line(f"%mass.next = fadd {F32} %mass, {code.exp(apart)}")
    code.again("i", LANES, "%width", "sum", "summed")
    code.label("summed")
    sums = code.at("%sums", code.value("mul i64 %r, 8"))
    code.store("float", maximum, sums)
    total = code.value(
        f"call reassoc float @llvm.vector.reduce.fadd.v16f32(float 0.0, {F32} %mass.next)"
    )
    code.store("float", total, code.at(sums, 4))
    first_pick = code.value("mul i64 %r, %picks")
    code.line("br label %pick")

    code.label("pick")
    code.line("%p = phi i64 [0, %summed], [%p.next, %picked]")
    code.line("br label %search")
    code.label("search")
    code.line("%s = phi i64 [0, %pick], [%s.next, %search]")
    code.line(f"%high = phi {F32} [{lowest}, %pick], [%high.next, %search]")
    code.line(f"%where = phi {I32} [zeroinitializer, %pick], [%where.next, %search]")
    found = code.load(F32, code.at("%blocks", code.value("mul i64 %s, 4")))
    index = code.value(
        f"add {I32} {code.spread('i32', code.value('trunc i64 %s to i32'))}, {_COUNTED}"
    )
    above = code.value(f"fcmp ogt {F32} {found}, %high")
    code.line(f"%high.next = select <16 x i1> {above}, {F32} {found}, {F32} %high")
    code.line(f"%where.next = select <16 x i1> {above}, {I32} {index}, {I32} %where")
    code.again("s", LANES, num_blocks, "search", "picked")

    code.label("picked")
    block = _first(code, "%high.next", "%where.next")
    start = code.value(f"mul i64 {block}, {_BLOCK}")
    place = numbers.at(x, start)
    high, where = lowest, "zeroinitializer"
    for i in range(_VECTORS):
        value = numbers.load(numbers.at(place, f"{i * LANES}"))
        index = code.value(f"add {I32} {code.spread('i32', str(i * LANES))}, {_COUNTED}")
        above = code.value(f"fcmp ogt {F32} {value}, {high}")
        high = code.value(f"select <16 x i1> {above}, {F32} {value}, {F32} {high}")
        where = code.value(f"select <16 x i1> {above}, {I32} {index}, {I32} {where}")
    inside = _first(code, high, where)
    number = code.value(f"add i64 {first_pick}, %p")
    code.store(
        "float", _reduced(code, high), code.at("%values", code.value(f"mul i64 {number}, 4"))
    )
    code.store(
        "i64",
        code.value(f"add i64 {start}, {inside}"),
        code.at("%indices", code.value(f"mul i64 {number}, 8")),
    )
    numbers.store_lowest(numbers.at(place, inside))
    left = [numbers.load(numbers.at(place, f"{i * LANES}")) for i in range(_VECTORS)]
    code.store(
        "float",
        _reduced(code, _maximum(code, left)),
        code.at("%blocks", code.value(f"mul i64 {block}, 4")),
    )
    code.again("p", 1, "%picks", "pick", "row.done")
    code.label("row.done")
    code.again("r", 1, "%rows", "row", "done")
    code.label("done")
    code.line("ret void")
    declared = f"""
declare float @llvm.vector.reduce.fadd.v16f32(float, {F32})
declare float @llvm.vector.reduce.fmax.v16f32({F32})
declare i32 @llvm.vector.reduce.smin.v16i32({I32})
"""
    head = (
        "void @largest(ptr %x, ptr %values, ptr %indices, ptr %sums, ptr %blocks, i64 %rows, "
        "i64 %width, i64 %picks)"
    )
    arguments = (*["ptr"] * 5, *["i64"] * 3)
    return jit.compiled("largest", arguments, DECLARED + declared + code.function(head))


def _larger(code: Code, a: str, b: str) -> str:
    """The larger numbers of two vectors, as an instruction; what is no number is passed over."""
    above = code.value(f"fcmp ogt {F32} {a}, {b}")
    return f"select <16 x i1> {above}, {F32} {a}, {F32} {b}"


def _maximum(code: Code, vectors: list[str]) -> str:
    """The largest numbers of vectors, lane by lane."""
    high = code.constant(-float("inf"))
    for vector in vectors:
        high = code.value(_larger(code, vector, high))
    return high


def _reduced(code: Code, vector: str) -> str:
    return code.value(f"call float @llvm.vector.reduce.fmax.v16f32({F32} {vector})")


def _first(code: Code, high: str, where: str) -> str:
    """The least of the indices at which the largest number stands, as an i64."""
    spread = code.spread("float", _reduced(code, high))
    equal = code.value(f"fcmp oeq {F32} {high}, {spread}")
    last = code.spread("i32", str(_TOP))
    indices = code.value(f"select <16 x i1> {equal}, {I32} {where}, {I32} {last}")
    least = code.value(f"call i32 @llvm.vector.reduce.smin.v16i32({I32} {indices})")
    return code.value(f"zext i32 {least} to i64")
