"""Which runs may be judged against each other: what of their fingerprints differs, in groups that a
user may allow one by one."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from specbench.merge import effective, flat
from specbench.messages import suggest
from specbench.metrics import request_names
from specbench.records import BASELINE, Run

MACHINE = "machine"
"""What differs here bears on times, and on rounding."""
WORKERS = "workers"
"""How many measured side by side: that bears on times alone."""
GROUPS: dict[str, tuple[str, ...]] = {
    "weights": ("provenance.weights_sha256",),
    "dtype": ("target.dtype",),
    "template": ("provenance.template_sha256",),
    "prompts": ("prompts",),
    "budget": ("settings.max_new_tokens",),
    "decoding": (
        "decoding",
        "settings.temperature",
        "settings.top_k",
        "settings.top_p",
        "settings.sampling",
        "settings.seed",
        "settings.batch_size",
    ),
    "method": ("methods",),
    MACHINE: (
        "provenance.cpu",
        "provenance.device",
        "provenance.threads_per_worker",
        "target.kernels",
    ),
    WORKERS: ("provenance.workers",),
}
"""By name: the keys of the fingerprint, and all below them."""
_CODE = ("source_sha256",)
"""Of a method: another code is what is to be judged."""


def differences(
    baseline: Run, run: Run, methods: Sequence[str], allow: Sequence[str]
) -> dict[str, list[str]]:
    """What sets a run apart from a baseline, a sentence for each key, by group; without the groups
    that are allowed to differ.

    Args:
        methods: those whose settings count; one that the baseline lacks has none to differ from.

    Raises:
        ValueError: an unknown group is allowed.
    """
    for name in allow:
        if name not in GROUPS:
            raise ValueError(
                f"--allow {name}: there is no such group{suggest(name, GROUPS)}; "
                f"valid: {', '.join(GROUPS)}"
            )
    was, is_ = _fingerprint(baseline, run, methods), _fingerprint(run, baseline, methods)
    found: dict[str, list[str]] = {}
    for key in sorted(was.keys() | is_.keys()):
        if was.get(key) != is_.get(key):
            text = f"{key} is {_show(is_.get(key))} instead of {_show(was.get(key))}"
            found.setdefault(_group(key), []).append(text)
    if lacking := list(_lacking(baseline, run)):
        found.setdefault("prompts", []).extend(lacking)
    return {name: texts for name, texts in found.items() if name not in allow}


def _fingerprint(run: Run, other: Run, methods: Sequence[str]) -> dict[str, Any]:
    """The leaves of what counts, by dotted key."""
    info = run.info
    parts = {part: info[part] for part in ("target", "settings", "provenance")}
    known = {key: value for key, value in flat(parts).items() if _group(key)}
    for name, about in _shared(info["workloads"], other.info["workloads"]):
        known[f"prompts.{name}.sha256"] = about.get("sha256")
        known |= flat(about.get("decoding", {}), f"decoding.{name}")
    for name, about in _shared(info["methods"], other.info["methods"]):
        if name in methods and name != BASELINE:
            kept = {key: value for key, value in effective(about).items() if key not in _CODE}
            known |= flat(kept, f"methods.{name}")
    return known


def _lacking(baseline: Run, run: Run) -> Iterator[str]:
    """What the run was not asked that the baseline was."""
    for workload in baseline.info["workloads"]:
        asked = request_names(baseline, workload)
        if missing := asked - request_names(run, workload):
            yield f"it lacks {len(missing)} of {len(asked)} requests of {workload}"


def _shared(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[tuple[str, Any]]:
    return [(name, about) for name, about in ours.items() if name in theirs]


def _group(key: str) -> str:
    """The group of a key; empty if it counts for nothing."""
    for name, keys in GROUPS.items():
        if any(key == one or key.startswith(f"{one}.") for one in keys):
            return name
    return ""


def _show(value: Any) -> str:
    return "not known" if value is None else str(value)
