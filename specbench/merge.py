"""Which runs may share a table, and the union of their records.

Two runs share a table if they have the same fingerprint: target, machine, code and every setting,
but for what they were asked to run. Runs that differ are kept apart, with a word on what differs.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from specbench.records import BASELINE, ReferenceRecord, RequestRecord, Run

_ASKED = ("methods", "workloads", "prompts", "num_prompts", "rounds")
"""Settings that say what to measure and how often, not how."""
_RESOLVED = ("target", "dtype", "workers", "depth", "knobs")
"""Settings whose effect stands in the target, the provenance or the methods."""
_PLACES = ("weights", "model", "label")
"""In a method's description: where its weights lie, and words made of it."""
_MEASURED_ON = (
    "code_version",
    "commit",
    "dirty",
    "python",
    "packages",
    "platform",
    "cpu",
    "device",
    "dtype",
    "threads_per_worker",
    "workers",
    "weights_sha256",
    "template_sha256",
)
"""Provenance that bears on the numbers; the command, the start and the load are shown only."""

Output = ReferenceRecord | RequestRecord
_Outputs = dict[tuple[str | None, str, str], tuple[Output, Run]]
"""By method (None for the reference pass), workload and request: the output and whence it is."""


@dataclass(frozen=True)
class Section:
    """Runs of one fingerprint.

    Args:
        runs: the runs.
        union: all their records.
        differs: what sets the fingerprint apart from the first section's, a sentence for each key.
    """

    runs: Sequence[Run]
    union: Run
    differs: Sequence[str]


def sections(runs: Sequence[Run]) -> list[Section]:
    """Groups runs by fingerprint, in the order of their first runs.

    Raises:
        ValueError: runs of one fingerprint hold the same output twice, or outputs that cannot both
        be right.
    """
    groups: list[list[Run]] = []
    for run in runs:
        for group in groups:
            if not any(differences(member, run) for member in group):
                group.append(run)
                break
        else:
            groups.append([run])
    first = groups[0][0] if groups else None
    return [
        Section(group, unite(group), differences(first, group[0]) if first else [])
        for group in groups
    ]


def differences(one: Run, other: Run) -> list[str]:
    """What sets two runs' fingerprints apart, a sentence for each key; empty if nothing does."""
    ours, theirs = fingerprint(one.info), fingerprint(other.info)
    for part in ("methods", "workloads"):
        mine, its = one.info.get(part, {}), other.info.get(part, {})
        # The baseline drafts nothing, so its knobs change nothing.
        for name in (mine.keys() & its.keys()) - {BASELINE}:
            ours |= flat(_without(effective(mine[name]), _ASKED), f"{part}.{name}")
            theirs |= flat(_without(effective(its[name]), _ASKED), f"{part}.{name}")
    return [
        f"{key} is {_show(theirs.get(key))} instead of {_show(ours.get(key))}"
        for key in sorted(ours.keys() | theirs.keys())
        if ours.get(key) != theirs.get(key)
    ]


def fingerprint(info: Mapping[str, Any]) -> dict[str, Any]:
    """What must be equal for two runs to be compared, by dotted key."""
    provenance = info.get("provenance", {})
    return {
        **flat(info.get("target", {}), "target"),
        **flat(_without(info.get("settings", {}), _ASKED + _RESOLVED), "settings"),
        **flat({key: provenance.get(key) for key in _MEASURED_ON}, "provenance"),
        "batch_size": info.get("batch_size"),
    }


def effective(described: Mapping[str, Any]) -> dict[str, Any]:
    """What counts of a method's (or workload's) description: weights of a known fingerprint are the
    same wherever they lie."""
    return _without(described, _PLACES if described.get("fingerprint") else ())


def _without(mapping: Mapping[str, Any], keys: Sequence[str]) -> dict[str, Any]:
    return {key: value for key, value in mapping.items() if key not in keys}


def flat(value: Any, name: str = "") -> dict[str, Any]:
    """The leaves of nested mappings, by dotted key."""
    if not isinstance(value, Mapping):
        return {name: value}
    prefix = f"{name}." if name else ""
    return {k: v for key in value for k, v in flat(value[key], f"{prefix}{key}").items()}


def _show(value: Any) -> str:
    return "not known" if value is None else str(value)


def unite(runs: Sequence[Run]) -> Run:
    """The union of runs of one fingerprint.

    Each run times the baseline beside its methods. The baseline's outputs must be the same in all
    of them, and a later run's rounds are numbered behind an earlier run's, so that a method is
    paired with the baseline of its own run.

    Raises:
        ValueError: two runs hold the same method's output of the same request, or different outputs
        of the target.
    """
    union = Run(runs[0].folder, _unite_info(runs))
    outputs: _Outputs = {}
    num_rounds = 0
    for run in runs:
        records: list[Output] = [*run.references, *run.requests]
        for record in records:
            _add(outputs, record, run)
        union.timings.extend(replace(t, round=t.round + num_rounds) for t in run.timings)
        union.failures.extend(run.failures)
        union.resources.extend(run.resources)
        union.missing_shards.extend(run.missing_shards)
        num_rounds += 1 + max((timing.round for timing in run.timings), default=-1)
    for record, _ in outputs.values():
        if isinstance(record, ReferenceRecord):
            union.references.append(record)
        else:
            union.requests.append(record)
    return union


def _unite_info(runs: Sequence[Run]) -> dict[str, Any]:
    merged = dict(runs[0].info)
    for part in ("methods", "workloads"):
        merged[part] = {k: v for run in runs for k, v in run.info.get(part, {}).items()}
    merged["shards"] = [shard for run in runs for shard in run.info["shards"]]
    return merged


def _add(outputs: _Outputs, record: Output, run: Run) -> None:
    method = record.method if isinstance(record, RequestRecord) else None
    key = (method, record.workload, record.request)
    if key not in outputs:
        outputs[key] = (record, run)
        return
    known, origin = outputs[key]
    name = f"the {method or 'reference'} output of {record.workload}, prompt {record.request}"
    if origin is run:
        raise ValueError(f"{run.folder} holds {name} twice")
    both = f"{origin.folder} and {run.folder}"
    if method not in (None, BASELINE):
        raise ValueError(f"{both} both hold {name}; report them one by one")
    if record.tokens != known.tokens:
        raise ValueError(f"{both} differ in {name} with the same settings; report them one by one")
