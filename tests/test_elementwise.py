"""The small operations round where torch's do, and no row's numbers depend on the others."""

import pytest
import torch
import torch.nn.functional as F

from specbench.target import elementwise

DTYPES = [
    pytest.param(
        dtype,
        marks=pytest.mark.skipif(
            not elementwise.available(dtype), reason=f"no kernels for {dtype}"
        ),
    )
    for dtype in (torch.float32, torch.bfloat16)
]
SHAPES = pytest.mark.parametrize(("rows", "width"), [(0, 32), (1, 16), (1, 576), (7, 48), (64, 96)])


def parts(rows: int, width: int, dtype: torch.dtype, scale: float = 1.0) -> torch.Tensor:
    """Rows that lie apart, as a padded product's do."""
    torch.manual_seed(rows + width)
    return (scale * torch.randn(rows, width + 32)).to(dtype)[:, :width]


def same(found: torch.Tensor, expected: torch.Tensor) -> None:
    """In bfloat16 all but a few numbers on a rounding edge are equal."""
    assert found.dtype == expected.dtype and found.shape == expected.shape
    torch.testing.assert_close(found, expected)
    if found.dtype == torch.bfloat16:
        assert (found != expected).sum() <= 0.002 * found.numel()


@pytest.mark.parametrize("dtype", DTYPES)
@SHAPES
def test_a_norm(rows: int, width: int, dtype: torch.dtype) -> None:
    x, weight = parts(rows, width, dtype, 3.0), torch.randn(width).to(dtype)
    found = elementwise.rms_norm(x, weight, 1e-5)
    same(found, weight * F.rms_norm(x.float(), (width,), eps=1e-5).to(dtype))
    for row in range(rows):
        assert torch.equal(elementwise.rms_norm(x[row], weight, 1e-5), found[row])


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_norm_of_nothing_and_of_no_number(dtype: torch.dtype) -> None:
    weight, x = torch.ones(32).to(dtype), torch.zeros(2, 32).to(dtype)
    assert not elementwise.rms_norm(x, weight, 1e-5).any()
    x[1, 5] = torch.nan
    found = elementwise.rms_norm(x, weight, 1e-5)
    assert found[1].isnan().all() and not found[0].any()


@pytest.mark.parametrize("dtype", DTYPES)
@SHAPES
@pytest.mark.parametrize("scale", [1.0, 40.0])
def test_a_gate(rows: int, width: int, dtype: torch.dtype, scale: float) -> None:
    x = parts(rows, 2 * width, dtype, scale)
    found = elementwise.gated(x)
    same(found, F.silu(x[:, :width]) * x[:, width:])
    for row in range(rows):
        assert torch.equal(elementwise.gated(x[row : row + 1])[0], found[row])


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_gate_at_the_ends_of_the_numbers(dtype: torch.dtype) -> None:
    gate = torch.tensor([0.0, -0.0, 1e-30, -1e-30, 88.0, -88.0, 1e30, -1e30] * 2).to(dtype)
    found = elementwise.gated(torch.cat([gate, torch.ones(16).to(dtype)])[None])[0]
    torch.testing.assert_close(found, F.silu(gate), atol=1e-30, rtol=1e-2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("rows", "heads", "dim"), [(0, 2, 32), (1, 12, 64), (5, 3, 32), (9, 1, 128)]
)
def test_a_rotation(rows: int, heads: int, dim: int, dtype: torch.dtype) -> None:
    """Of some heads of each row; the others stay as they are."""
    x = parts(rows, (heads + 2) * dim, dtype).view(rows, heads + 2, dim)
    angles = torch.randn(rows, dim // 2).repeat(1, 2)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    rolled = torch.cat([-x[..., dim // 2 :], x[..., : dim // 2]], dim=-1)
    expected = x.clone()
    expected[:, :heads] = (x * cos[:, None] + rolled * sin[:, None])[:, :heads]
    elementwise.rotate(x[:, :heads], cos, sin)
    assert torch.equal(x, expected)


def test_other_types_and_widths_have_no_kernel() -> None:
    assert not elementwise.available(torch.float16, 32)
    assert not elementwise.available(torch.float64, 32)
    assert not elementwise.available(torch.float32, 32, 24)
