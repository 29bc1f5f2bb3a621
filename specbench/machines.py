"""Machines and model shapes to simulate: the table of devices, the named shapes, and any config of
transformers."""

import json
import tomllib
from dataclasses import dataclass
from functools import cache
from math import isfinite
from pathlib import Path
from typing import Any

from specbench.costs import Cost, Shape, shape_of
from specbench.messages import in_one_line, suggest

_HERE = Path(__file__).parent
WIDTHS = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes of a number, by dtype."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What a pass takes: T = max(bytes / bandwidth, FLOPs / rate) + overhead.

    Args:
        name: how it is called.
        bandwidth: bytes a second.
        rate: FLOPs a second.
        overhead_s: of a pass, for each of its decoder layers.
        memory_bytes: how much it holds; 0 where that is not known.
    """

    name: str
    bandwidth: float
    rate: float
    overhead_s: float
    memory_bytes: float = 0.0

    def __post_init__(self) -> None:
        speeds, rest = (self.bandwidth, self.rate), (self.overhead_s, self.memory_bytes)
        if not (all(map(isfinite, (*speeds, *rest))) and min(speeds) > 0 <= min(rest)):
            raise ValueError(
                f"{self.name}: bandwidth, FLOP/s or overhead is out of range; valid: numbers above "
                "0, of the overhead 0 or more"
            )

    def seconds(self, cost: Cost, num_layers: int) -> float:
        """Of passes that cost this much and go through so many layers, all of them together."""
        traffic, arithmetic = cost.num_bytes / self.bandwidth, cost.flops / self.rate
        return max(traffic, arithmetic) + num_layers * self.overhead_s

    def is_compute_bound(self, cost: Cost) -> bool:
        """Whether arithmetic takes longer than traffic."""
        return cost.flops / self.rate > cost.num_bytes / self.bandwidth

    def times(self, num_devices: int) -> "Machine":
        """So many of them, without a loss."""
        if num_devices == 1:
            return self
        return Machine(
            name=f"{num_devices} x {self.name}",
            bandwidth=num_devices * self.bandwidth,
            rate=num_devices * self.rate,
            overhead_s=self.overhead_s,
            memory_bytes=num_devices * self.memory_bytes,
        )


@cache
def _devices() -> dict[str, dict[str, Any]]:
    return tomllib.loads((_HERE / "devices.toml").read_text(encoding="utf-8"))


def device_names() -> list[str]:
    """Of the table."""
    return list(_devices())


def load_machine(name: str, dtype: str) -> Machine:
    """A device of the table, at a dtype.

    Raises:
        ValueError: there is none of that name, or it does not compute in that dtype.
    """
    by_key = {known.lower(): known for known in _devices()}
    known = by_key.get(name.lower())
    if known is None:
        raise ValueError(
            f"unknown device {name!r}{suggest(name, _devices())}; valid: "
            f"{', '.join(_devices())}, or --bandwidth-gb-s, --tflops and --overhead-us"
        )
    entry = _devices()[known]
    if dtype not in entry["tflops"]:
        raise ValueError(f"unknown dtype {dtype!r}; valid: {', '.join(entry['tflops'])}")
    return Machine(
        name=known,
        bandwidth=entry["bandwidth_gb_s"] * 1e9,
        rate=entry["tflops"][dtype] * 1e12,
        overhead_s=entry["overhead_us"] * 1e-6,
        memory_bytes=entry["memory_gib"] * 2**30,
    )


def shape_names() -> list[str]:
    """Models whose shapes come with the project."""
    return sorted(path.name.removesuffix(".json") for path in (_HERE / "shapes").glob("*.json"))


def load_shape(name: str) -> Shape:
    """A model's shape, from a name of `shape_names`, a folder or file with its config, or the Hub.

    Raises:
        ValueError: there is no such config, or it is of a kind that is not counted.
    """
    try:
        return shape_of(_config(name))
    except ValueError as error:
        raise ValueError(f"model {name!r}: {error}") from error


def _config(name: str) -> dict[str, Any]:
    named = _HERE / "shapes" / f"{name.lower()}.json"
    path = named if named.is_file() else Path(name)
    path = path / "config.json" if path.is_dir() else path
    if path.is_file():
        config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return config
    from transformers import AutoConfig

    try:
        found: dict[str, Any] = AutoConfig.from_pretrained(name).to_dict()
        return found
    except Exception as error:  # huggingface_hub raises classes of its own
        raise ValueError(
            f"no config ({in_one_line(error)}); valid: {', '.join(shape_names())}, a folder, or a "
            "name on the Hub"
        ) from error
