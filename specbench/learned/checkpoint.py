"""Reading a drafter's checkpoint: a folder or a Hub name, its config and its tensors, each
accounted for."""

import json
import pickle
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from specbench.messages import in_one_line

CONFIG, CARD = "config.json", "card.json"
WEIGHTS = "model.safetensors"
_FILES = (WEIGHTS, "pytorch_model.bin")


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint as it lies on disk.

    Args:
        name: how the user named it.
        config: its ``config.json``.
        tensors: all its tensors by key, on the CPU.
    """

    name: str
    config: dict[str, Any]
    tensors: dict[str, torch.Tensor]

    def error(self, problem: str) -> ValueError:
        """An error that names the checkpoint."""
        return ValueError(f"checkpoint {self.name!r} {problem}")

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Within, what its config or tensors have that no code here expects is an error that names
        the checkpoint."""
        try:
            yield
        except ValueError:
            raise
        except (
            TypeError,
            AttributeError,
            LookupError,
            RuntimeError,
            ArithmeticError,
            AssertionError,
        ) as error:
            kind = type(error).__name__
            raise self.error(f"cannot be read ({kind}: {in_one_line(error)})") from error

    def check_made_for(self, wanted: Mapping[str, Any]) -> None:
        """Holds its config to a target's.

        Raises:
            ValueError: names the first setting that differs.
        """
        for key, value in wanted.items():
            if (found := self.config.get(key)) != value:
                raise self.error(
                    f"was made for another target: {key} is {found}; this target needs {value}"
                )


def load_checkpoint(source: str | Path, files: Sequence[str] = _FILES) -> Checkpoint:
    """Reads a checkpoint.

    Args:
        source: a folder, or a Hub name.
        files: the names that its weights may have, the preferred one first; a file's index
            (``<name>.index.json``) stands for its shards. ``.safetensors``, or what `torch.load`
            reads with ``weights_only``.

    Raises:
        ValueError: there is no such folder or Hub name, it lacks a file, or a file is damaged or
            not the one that its card describes.
    """
    name = str(source)
    folder = _folder(name, files)
    try:
        config = json.loads((folder / CONFIG).read_text())
    except FileNotFoundError:
        raise ValueError(f"checkpoint {name!r} has no {CONFIG}") from None
    except (OSError, ValueError) as error:
        raise ValueError(f"checkpoint {name!r}: {CONFIG}: {in_one_line(error)}") from error
    if not isinstance(config, dict):
        raise ValueError(f"checkpoint {name!r}: {CONFIG} holds no settings")
    tensors: dict[str, torch.Tensor] = {}
    known = _sums(folder, name)
    for path in _weight_files(folder, files, name):
        tensors |= _read(path, name)
        if path.name in known and sha256(path.read_bytes()).hexdigest() != known[path.name]:
            raise ValueError(
                f"checkpoint {name!r}: {path.name} is not the file that {CARD} describes; valid: "
                f"the file as it was, or no {CARD}"
            )
    return Checkpoint(name, config, tensors)


def save_checkpoint(
    folder: Path,
    config: Mapping[str, Any],
    tensors: Mapping[str, torch.Tensor],
    file: str = WEIGHTS,
) -> None:
    """Writes a checkpoint: ``config.json`` and a file of safetensors, floats in bfloat16; a card of
    what was there before goes.

    Raises:
        ValueError: it cannot be written.
    """
    (folder / CARD).unlink(missing_ok=True)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
    narrow = {
        key: (value.bfloat16() if value.is_floating_point() else value).detach().cpu().contiguous()
        for key, value in tensors.items()
    }
    try:
        save_file(narrow, folder / file)
    except SafetensorError as error:
        raise ValueError(f"{folder / file} cannot be written: {in_one_line(error)}") from error


def _folder(name: str, files: Sequence[str]) -> Path:
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    if path.is_absolute() or name.startswith((".", "~")) or name.count("/") != 1:
        raise ValueError(f"no checkpoint folder {name!r}; valid: a folder or a Hub name")
    patterns = [CONFIG, *(f"{stem}*{suffix}" for stem, suffix in map(_split, files))]
    patterns += [f"{file}.index.json" for file in files]
    try:
        return Path(snapshot_download(name, allow_patterns=patterns))
    except Exception as error:
        raise ValueError(f"cannot get checkpoint {name!r}: {in_one_line(error)}") from error


def _split(file: str) -> tuple[str, str]:
    stem, dot, suffix = file.rpartition(".")
    return stem, dot + suffix


def _weight_files(folder: Path, files: Sequence[str], name: str) -> list[Path]:
    for file in files:
        if (folder / file).is_file():
            return [folder / file]
        index = folder / f"{file}.index.json"
        if index.is_file():
            try:
                shards = sorted(set(json.loads(index.read_text())["weight_map"].values()))
                return [folder / shard for shard in shards]
            except (OSError, ValueError, LookupError, AttributeError, TypeError) as error:
                raise ValueError(
                    f"checkpoint {name!r}: {index.name}: {in_one_line(error)}"
                ) from error
    raise ValueError(f"checkpoint {name!r} has no weights; valid: {', '.join(files)}")


def _sums(folder: Path, name: str) -> dict[str, str]:
    """The SHA-256 of each file, as the card of a trained checkpoint has it."""
    path = folder / CARD
    if not path.is_file():
        return {}
    try:
        return dict(json.loads(path.read_text()).get("sha256", {}))
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise ValueError(f"checkpoint {name!r}: {CARD}: {in_one_line(error)}") from error


def _read(path: Path, name: str) -> dict[str, torch.Tensor]:
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        found = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, ValueError, pickle.UnpicklingError, EOFError) as error:
        raise ValueError(f"checkpoint {name!r}: {path.name}: {in_one_line(error)}") from error
    except Exception as error:  # safetensors raises a class of its own
        raise ValueError(f"checkpoint {name!r}: {path.name}: {in_one_line(error)}") from error
    if not isinstance(found, Mapping) or not all(
        isinstance(value, torch.Tensor) for value in found.values()
    ):
        raise ValueError(f"checkpoint {name!r}: {path.name} holds more than tensors by name")
    return dict(found)


def fill(
    module: nn.Module,
    tensors: Mapping[str, torch.Tensor],
    checkpoint: Checkpoint,
    optional: Collection[str] = (),
) -> None:
    """Copies tensors into a module's parameters and buffers of the same names.

    Args:
        module: what to fill.
        tensors: by the module's own names.
        checkpoint: whose they are, for the messages.
        optional: names that may be missing; the module keeps what it has there.

    Raises:
        ValueError: names the keys that are missing or unknown, or the one of another shape or
            with values that are no numbers.
    """
    own = module.state_dict(keep_vars=True)
    for problem, keys in (
        ("lacks", own.keys() - tensors.keys() - set(optional)),
        ("has unknown tensors:", tensors.keys() - own.keys()),
    ):
        if keys:
            shown = sorted(keys)[:4]
            more = f" and {len(keys) - len(shown)} more" if len(keys) > len(shown) else ""
            raise checkpoint.error(f"{problem} {', '.join(shown)}{more}")
    with torch.no_grad():
        for key, value in tensors.items():
            if own[key].shape != value.shape:
                raise checkpoint.error(
                    f"has {key} of shape {tuple(value.shape)}; this target needs "
                    f"{tuple(own[key].shape)}"
                )
            if own[key].is_floating_point() and not (
                value.is_floating_point() and value.isfinite().all()
            ):
                raise checkpoint.error(f"has values in {key} that are no numbers")
            own[key].copy_(value)
