"""Attention over a cache for a CPU with AVX-512.

Four queries at a time, which share the reading of keys and values: scores, softmax, mixed values.
Every score is one dot product, and sums over slots go one slot after another, in float32. A slot
that is masked adds exactly 0. So what a node's attention is does not depend, to the last bit, on
which other nodes and rows stand beside it, nor on where in a tree its ancestors lie.

Shapes: B rows, H query heads, K key-value heads, N nodes, S slots, D head dimension.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial

import torch

from specbench.target import jit
from specbench.target.jit import F32, I32, LANES, Code

_REGISTERS = 16
"""Of 32 vector registers, those for mixed values."""
_BF16_PAIRS = "<32 x bfloat>"
_DOT = "@llvm.x86.avx512bf16.dpbf16ps.512"
_FEATURES = {torch.float32: "avx512f", torch.bfloat16: "avx512bf16"}
_DECLARED = f"""
declare float @llvm.vector.reduce.fmax.v16f32({F32})
declare {F32} @llvm.masked.load.v16f32.p0(ptr, i32, <16 x i1>, {F32})
declare <16 x bfloat> @llvm.masked.load.v16bf16.p0(ptr, i32, <16 x i1>, <16 x bfloat>)
declare {F32} {_DOT}({F32}, {_BF16_PAIRS}, {_BF16_PAIRS})
"""


def available(dtype: torch.dtype, head_dim: int) -> bool:
    """Whether there is a kernel for a type and head dimension on this CPU."""
    return (
        dtype in _FEATURES
        and head_dim % 32 == 0
        and jit.available(_FEATURES[dtype])
        and _compiles(dtype, head_dim)
    )


@cache
def _compiles(dtype: torch.dtype, head_dim: int) -> bool:
    return jit.compiles(partial(_kernel, dtype, head_dim))


def attend(
    query_BHND: torch.Tensor,
    key_BKSD: torch.Tensor,
    value_BKSD: torch.Tensor,
    mask_B1NS: torch.Tensor,
    extents_B2: torch.Tensor,
    padded: bool,
    scale: float,
) -> torch.Tensor:
    """softmax(q k^T scale + mask) v; H / K query heads in a row share a key-value head.

    Args:
        query_BHND: of any strides but for D, of a type and dimension that is `available`.
        key_BKSD, value_BKSD: slots contiguous; up to the next multiple of 16 slots there must be
            memory behind the S.
        mask_B1NS: added to the scores; S contiguous.
        extents_B2: int64, how many nodes and slots of a row are its own.
        padded: whether any row has fewer than N nodes.
        scale: of the scores.

    Returns:
        [B, N, H, D], contiguous; zeros at a row's padding nodes.
    """
    batch, heads, num_nodes, dim = query_BHND.shape
    num_kv = key_BKSD.shape[1]
    new = query_BHND.new_zeros if padded else query_BHND.new_empty
    out_BNHD = new(batch, num_nodes, heads, dim)
    num_scores = _rows(dim) * (key_BKSD.shape[2] + LANES)
    scratch = torch.empty(num_scores, dtype=torch.float32, device="cpu")
    size = query_BHND.element_size()
    row, head, node, _ = query_BHND.stride()
    _kernel(query_BHND.dtype, dim)(
        query_BHND.data_ptr(),
        row * size,
        head * size,
        node * size,
        key_BKSD.data_ptr(),
        value_BKSD.data_ptr(),
        key_BKSD.stride(0) * size,
        key_BKSD.stride(1) * size,
        mask_B1NS.data_ptr(),
        mask_B1NS.stride(0) * size,
        mask_B1NS.stride(2) * size,
        out_BNHD.data_ptr(),
        num_nodes * heads * dim * size,
        extents_B2.data_ptr(),
        batch,
        num_kv,
        heads // num_kv,
        scratch.data_ptr(),
        scale,
    )
    return out_BNHD


def _rows(dim: int) -> int:
    """Queries that are worked on together."""
    return max(1, min(4, _REGISTERS * LANES // dim))


@dataclass(frozen=True)
class _Kind:
    """A type of keys, values, queries, masks and outputs, and a head dimension."""

    is_float: bool
    dim: int

    @property
    def size(self) -> int:
        return 4 if self.is_float else 2

    @property
    def vectors(self) -> int:
        """64-byte vectors of a key."""
        return self.dim * self.size // 64

    def load(self, code: Code, pointer: str) -> list[str]:
        """A key or query."""
        kind = F32 if self.is_float else _BF16_PAIRS
        return [code.load(kind, pointer, 64 * i) for i in range(self.vectors)]

    def dot(self, code: Code, query: Sequence[str], key: Sequence[str]) -> str:
        """Products of a query and a key, added up to 16 sums."""
        total = "zeroinitializer"
        for one, other in zip(query, key, strict=True):
            if self.is_float:
                total = code.fma(one, other, total)
            else:
                pairs = f"{_BF16_PAIRS} {one}, {_BF16_PAIRS} {other}"
                total = code.value(f"call {F32} {_DOT}({F32} {total}, {pairs})")
        return total

    def widen(self, code: Code, pointer: str) -> list[str]:
        """A value as vectors of float32; of bfloat16, in turn those of even and of odd places."""
        if self.is_float:
            return self.load(code, pointer)
        found = []
        for i in range(self.vectors):
            pairs = code.load(I32, pointer, 64 * i)
            shift = code.spread("i32", "16")
            mask = code.spread("i32", str(-65536))
            even = code.value(f"shl {I32} {pairs}, {shift}")
            odd = code.value(f"and {I32} {pairs}, {mask}")
            found += [code.value(f"bitcast {I32} {half} to {F32}") for half in (even, odd)]
        return found

    def narrow(self, code: Code, mixed: Sequence[str], pointer: str) -> None:
        """Stores what was mixed from widened values."""
        if self.is_float:
            for i, vector in enumerate(mixed):
                code.store(F32, vector, code.at(pointer, 64 * i))
            return
        order = ", ".join(f"i32 {lane // 2 + LANES * (lane % 2)}" for lane in range(2 * LANES))
        for i, (even, odd) in enumerate(zip(mixed[::2], mixed[1::2], strict=True)):
            woven = code.value(f"shufflevector {F32} {even}, {F32} {odd}, <32 x i32> <{order}>")
            short = code.value(f"fptrunc <32 x float> {woven} to {_BF16_PAIRS}")
            code.store(_BF16_PAIRS, short, code.at(pointer, 64 * i))

    def masks(self, code: Code, pointer: str, lanes: str) -> str:
        """16 entries of the mask, those of the lanes that are on."""
        kind, name = (F32, "v16f32") if self.is_float else ("<16 x bfloat>", "v16bf16")
        found = code.value(
            f"call {kind} @llvm.masked.load.{name}.p0(ptr {pointer}, i32 {self.size}, "
            f"<16 x i1> {lanes}, {kind} zeroinitializer)"
        )
        return found if self.is_float else code.value(f"fpext {kind} {found} to {F32}")


@cache
def _kernel(dtype: torch.dtype, dim: int) -> Callable[..., None]:
    kind, rows = _Kind(dtype == torch.float32, dim), _rows(dim)
    blocks = [_block(kind, count) for count in range(1, rows + 1)]
    pointer, number = "ptr", "i64"
    arguments = (
        *(pointer, number, number, number),
        *(pointer, pointer, number, number),
        *(pointer, number, number),
        *(pointer, number),
        *(pointer, number, number, number),
        *(pointer, "float"),
    )
    return jit.compiled(
        "attend", arguments, "\n".join([jit.DECLARED, _DECLARED, *blocks, _loops(kind, rows)])
    )


def _transposed_sum(code: Code, vectors: Sequence[str]) -> str:
    """Of 16 vectors each one's sum, in a vector."""
    while len(vectors) > 1:
        halves = []
        for a, b in zip(vectors[::2], vectors[1::2], strict=True):
            parts = []
            for odd in (0, 1):
                lanes = ", ".join(f"i32 {2 * lane + odd}" for lane in range(LANES))
                parts.append(
                    code.value(f"shufflevector {F32} {a}, {F32} {b}, <16 x i32> <{lanes}>")
                )
            halves.append(code.value(f"fadd {F32} {parts[0]}, {parts[1]}"))
        vectors = halves
    return vectors[0]


def _block(kind: _Kind, rows: int) -> str:
    """Attention of so many queries that share a key-value head: pointers to the queries, to their
    rows of the mask and to their outputs, then keys and values."""
    code = Code()
    key_bytes = kind.dim * kind.size
    code.label("entry")
    scratch_bytes = code.value("mul i64 %stride, 4")
    scale = code.spread("float", "%scale")
    lane_numbers = "<" + ", ".join(f"i32 {lane}" for lane in range(LANES)) + ">"
    slots = code.spread("i32", code.value("trunc i64 %slots to i32"))
    lowest = code.constant(-float("inf"))
    scores = [code.at("%scratch", code.value(f"mul i64 {scratch_bytes}, {r}")) for r in range(rows)]
    before = "entry"
    for r in range(rows):
        query = kind.load(code, code.load("ptr", "%queries", 8 * r))
        mask = code.load("ptr", "%masks", 8 * r)
        code.line(f"br label %score{r}")
        code.label(f"score{r}")
        code.line(f"%s{r} = phi i64 [0, %{before}], [%s{r}.next, %score{r}]")
        code.line(f"%max{r} = phi {F32} [{lowest}, %{before}], [%max{r}.next, %score{r}]")
        keys = code.at("%keys", code.value(f"mul i64 %s{r}, {key_bytes}"))
        sums = [
            kind.dot(code, query, kind.load(code, code.at(keys, key_bytes * i)))
            for i in range(LANES)
        ]
        first = code.spread("i32", code.value(f"trunc i64 %s{r} to i32"))
        number = code.value(f"add {I32} {first}, {lane_numbers}")
        lanes = code.value(f"icmp slt {I32} {number}, {slots}")
        place = code.at(mask, code.value(f"mul i64 %s{r}, {kind.size}"))
        score = code.fma(_transposed_sum(code, sums), scale, kind.masks(code, place, lanes))
        score = code.value(f"select <16 x i1> {lanes}, {F32} {score}, {F32} {lowest}")
        code.store(F32, score, code.at(scores[r], code.value(f"mul i64 %s{r}, 4")))
        larger = code.value(f"fcmp ogt {F32} {score}, %max{r}")
        code.line(f"%max{r}.next = select <16 x i1> {larger}, {F32} {score}, {F32} %max{r}")
        code.line(f"%s{r}.next = add i64 %s{r}, {LANES}")
        code.line(f"%more{r} = icmp slt i64 %s{r}.next, %slots")
        code.line(f"br i1 %more{r}, label %score{r}, label %scored{r}")
        code.label(f"scored{r}")
        largest = code.value(f"call float @llvm.vector.reduce.fmax.v16f32({F32} %max{r}.next)")
        largest = code.spread("float", largest)
        code.line(f"br label %exp{r}")
        code.label(f"exp{r}")
        code.line(f"%e{r} = phi i64 [0, %scored{r}], [%e{r}.next, %exp{r}]")
        place = code.at(scores[r], code.value(f"mul i64 %e{r}, 4"))
        apart = code.value(f"fsub {F32} {code.load(F32, place)}, {largest}")
        code.store(F32, code.exp(apart), place)
        code.line(f"%e{r}.next = add i64 %e{r}, {LANES}")
        code.line(f"%again{r} = icmp slt i64 %e{r}.next, %slots")
        code.line(f"br i1 %again{r}, label %exp{r}, label %weighed{r}")
        code.label(f"weighed{r}")
        before = f"weighed{r}"
    code.line("br label %mix")

    code.label("mix")
    code.line(f"%m = phi i64 [0, %{before}], [%m.next, %mix]")
    parts = range(kind.dim // LANES)
    for r in range(rows):
        code.line(f"%mass{r} = phi {F32} [zeroinitializer, %{before}], [%mass{r}.next, %mix]")
        for i in parts:
            code.line(
                f"%mix{r}.{i} = phi {F32} [zeroinitializer, %{before}], [%mix{r}.{i}.next, %mix]"
            )
    value = kind.widen(code, code.at("%values", code.value(f"mul i64 %m, {key_bytes}")))
    offset = code.value("mul i64 %m, 4")
    for r in range(rows):
        weight = code.spread("float", code.load("float", scores[r], offset))
        code.line(f"%mass{r}.next = fadd {F32} %mass{r}, {weight}")
        for i in parts:
            code.line(
                f"%mix{r}.{i}.next = call {F32} @llvm.fma.v16f32({F32} {weight}, "
                f"{F32} {value[i]}, {F32} %mix{r}.{i})"
            )
    code.line("%m.next = add i64 %m, 1")
    code.line("%m.more = icmp slt i64 %m.next, %slots")
    code.line("br i1 %m.more, label %mix, label %mixed")
    code.label("mixed")
    for r in range(rows):
        mixed = [code.value(f"fdiv {F32} %mix{r}.{i}.next, %mass{r}.next") for i in parts]
        kind.narrow(code, mixed, code.load("ptr", "%outs", 8 * r))
    code.line("ret void")
    return code.function(
        f"internal void @block{rows}(ptr %queries, ptr %masks, ptr %outs, ptr noalias %keys, "
        "ptr noalias %values, ptr noalias %scratch, i64 %stride, i64 %slots, float %scale) noinline"
    )


def _loops(kind: _Kind, rows: int) -> str:
    """All rows, for each of them all key-value heads, and for each of those its queries."""
    code = Code()
    code.label("entry")
    for name in ("queries", "masks", "outs"):
        code.line(f"%{name} = alloca [{rows} x ptr]")
    heads = code.value("mul i64 %num_kv, %groups")
    out_node = code.value(f"mul i64 {heads}, {kind.dim * kind.size}")
    code.line("br label %row")

    code.label("row")
    code.line("%b = phi i64 [0, %entry], [%b.next, %row.done]")
    extent = code.at("%extents", code.value("mul i64 %b, 16"))
    nodes, slots = code.load("i64", extent), code.load("i64", extent, 8)
    num_queries = code.value(f"mul i64 {nodes}, %groups")
    # Of the scratch of a row of scores: all slots, filled up to whole vectors.
    stride = code.value(f"and i64 {code.value(f'add i64 {slots}, {LANES - 1}')}, {-LANES}")
    q_row = code.at("%q", code.value("mul i64 %b, %q_row"))
    mask_row = code.at("%mask", code.value("mul i64 %b, %mask_row"))
    out_row = code.at("%out", code.value("mul i64 %b, %out_row"))
    kv_row = code.value("mul i64 %b, %kv_row")
    idle = code.value(f"icmp eq i64 {nodes}, 0")
    code.line(f"br i1 {idle}, label %row.done, label %head")

    code.label("head")
    code.line("%h = phi i64 [0, %row], [%h.next, %head.done]")
    kv = code.value(f"add i64 {kv_row}, {code.value('mul i64 %h, %kv_head')}")
    keys, values = code.at("%k", kv), code.at("%v", kv)
    first_head = code.value("mul i64 %h, %groups")
    code.line("br label %chunk")

    code.label("chunk")
    code.line("%j = phi i64 [0, %head], [%j.next, %chunk.done]")
    left = code.value(f"sub i64 {num_queries}, %j")
    for r in range(rows):
        # Beyond the last query the numbers point nowhere, and nothing reads there.
        index = code.value(f"add i64 %j, {r}")
        node = code.value(f"udiv i64 {index}, %groups")
        head = code.value(f"add i64 {first_head}, {code.value(f'urem i64 {index}, %groups')}")
        query = code.at(q_row, code.value(f"mul i64 {head}, %q_head"))
        query = code.at(query, code.value(f"mul i64 {node}, %q_node"))
        out = code.at(out_row, code.value(f"mul i64 {node}, {out_node}"))
        out = code.at(out, code.value(f"mul i64 {head}, {kind.dim * kind.size}"))
        mask = code.at(mask_row, code.value(f"mul i64 {node}, %mask_node"))
        for name, pointer in (("queries", query), ("masks", mask), ("outs", out)):
            code.store("ptr", pointer, code.at(f"%{name}", 8 * r))
    cases = " ".join(f"i64 {count}, label %rows{count}" for count in range(1, rows))
    code.line(f"switch i64 {left}, label %rows{rows} [{cases}]")
    for count in range(1, rows + 1):
        code.label(f"rows{count}")
        code.line(
            f"call void @block{count}(ptr %queries, ptr %masks, ptr %outs, ptr {keys}, "
            f"ptr {values}, ptr %scratch, i64 {stride}, i64 {slots}, float %scale)"
        )
        code.line("br label %chunk.done")
    code.label("chunk.done")
    code.line(f"%j.next = add i64 %j, {rows}")
    code.line(f"%more.queries = icmp slt i64 %j.next, {num_queries}")
    code.line("br i1 %more.queries, label %chunk, label %head.done")
    code.label("head.done")
    code.line("%h.next = add i64 %h, 1")
    code.line("%more.heads = icmp slt i64 %h.next, %num_kv")
    code.line("br i1 %more.heads, label %head, label %row.done")
    code.label("row.done")
    code.line("%b.next = add i64 %b, 1")
    code.line("%more.rows = icmp slt i64 %b.next, %batch")
    code.line("br i1 %more.rows, label %row, label %done")
    code.label("done")
    code.line("ret void")
    return code.function(
        "void @attend(ptr %q, i64 %q_row, i64 %q_head, i64 %q_node, ptr %k, ptr %v, i64 %kv_row, "
        "i64 %kv_head, ptr %mask, i64 %mask_row, i64 %mask_node, ptr %out, i64 %out_row, "
        "ptr %extents, i64 %batch, i64 %num_kv, i64 %groups, ptr %scratch, float %scale)"
    )
