"""A worker: loads the target and all the methods once, in its process and on its device, then
measures shards."""

import gc
import os
import resource
from typing import Any

import huggingface_hub.utils
import torch
import transformers

from specbench import provenance, registry
from specbench.bench import Bench, in_words
from specbench.config import RunConfig
from specbench.messages import in_one_line
from specbench.method import Method
from specbench.records import Record, ResourceRecord
from specbench.shards import Shard
from specbench.target import Target, load_target
from specbench.workloads import template_sha256


class Worker:
    """Holds the target and the methods of a run.

    Args:
        config: the run's settings.
        num_threads: threads of this process; None leaves them alone.

    Raises:
        ValueError: the target or a method cannot be loaded.
    """

    def __init__(self, config: RunConfig, num_threads: int | None = None) -> None:
        hush()
        if num_threads is not None:
            torch.set_num_threads(num_threads)
        self.config = config
        self.target = _load_target(config)
        self._check_target()
        self.methods = {name: _load_method(name, config, self.target) for name in config.methods}
        self.bench = Bench(config, self.target, self.methods)
        self.bench.warm_up()
        # All that is loaded stays: the collector need not look through it in the timed passes.
        gc.collect()
        gc.freeze()

    def _check_target(self) -> None:
        if self.target.tokenizer is None:
            raise ValueError(f"target {self.target.name!r} has no tokenizer")
        most = self.target.max_context - 1
        if self.config.max_new_tokens > most:
            raise ValueError(
                f"--max-new-tokens {self.config.max_new_tokens} is beyond the context of target "
                f"{self.target.name!r}; valid: 1..{most}, less the prompt"
            )

    def describe(self) -> dict[str, Any]:
        """What is measured and on what, for the provenance."""
        target = self.target
        assert target.tokenizer is not None
        return {
            "target": {
                "name": target.name,
                "dtype": str(target.dtype).removeprefix("torch."),
                "num_parameters": target.num_parameters,
                "num_weight_bytes": target.num_weight_bytes,
                "kernels": target.kernels,
                "bitwise": target.bitwise,
                "weights_sha256": target.fingerprint,
                "note": target.note,
            },
            "methods": {
                name: method.describe()
                | {
                    "lossy": method.typical is not None,
                    "source_sha256": registry.source_sha256(type(method)),
                }
                for name, method in self.methods.items()
            },
            "template_sha256": template_sha256(target.tokenizer),
            "machine": provenance.machine(),
            "device": torch.cuda.get_device_name() if target.device.type == "cuda" else "cpu",
            "num_threads": torch.get_num_threads(),
        }

    def run(self, shard: Shard) -> list[Record]:
        """All records of a shard."""
        return [*self.bench.measure(shard), self._resources()]

    def _resources(self) -> ResourceRecord:
        if self.target.device.type == "cuda":
            peak_mib = torch.cuda.max_memory_allocated() / 2**20
        else:
            peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
        return ResourceRecord(
            peak_memory_mib=round(peak_mib, 1),
            num_threads=torch.get_num_threads(),
            load_average=os.getloadavg()[0],
        )


def _load_target(config: RunConfig) -> Target:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return load_target(
        config.target,
        dtype=config.dtype,
        device=device,
        num_devices=config.gpus_per_worker if device.type == "cuda" else 1,
    )


def _load_method(name: str, config: RunConfig, target: Target) -> Method:
    cls = registry.load_method(name)
    try:
        return cls(target, config.method_config(name, cls))
    except ValueError:
        raise
    except Exception as error:
        raise ValueError(f"method {name!r} cannot be set up: {in_words(error)}") from error


def find_unready(config: RunConfig) -> dict[str, str]:
    """By name, why each method of a run that cannot be set up for its target cannot.

    Raises:
        ValueError: the target cannot be loaded.
    """
    hush()
    target, found = _load_target(config), dict[str, str]()
    for name in config.methods:
        try:
            _load_method(name, config, target)
        except ValueError as error:
            found[name] = f"{name}: {in_one_line(error)}"
    return found


def hush() -> None:
    """Keeps progress bars and advice of the libraries off the terminal; what matters comes as an
    error."""
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    huggingface_hub.utils.disable_progress_bars()
