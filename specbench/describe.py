"""What a report says in prose: of workloads, provenance, and what a reader must be warned of."""

import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from specbench.columns import number, percent
from specbench.filing import is_edited
from specbench.merge import Section
from specbench.messages import are, counted
from specbench.metrics import LEAST_LAW_P, peak_memory_mib
from specbench.records import FailureRecord, RequestRecord, Run
from specbench.stats import MIN_CLUSTERS
from specbench.summary import WorkloadResult

_MOST_NAMED = 3
_MOST_DIFFERENCES = 8
_PACKAGES = ("torch", "transformers")
_BUSY = 0.5
"""Load average, as a share of the cores, from which another program may take a worker's core."""


def describe_workload(workload: WorkloadResult) -> str:
    """A workload's line: kind, size, entropy, loops and decoding."""
    about = workload.metrics
    turns = f" ({about.num_requests} turns)" if about.num_requests != about.num_prompts else ""
    decodings = " and ".join(_decoding(decoding) for decoding in workload.decodings)
    return "; ".join(
        [
            f"kind {about.kind}",
            f"{counted(about.num_prompts, 'prompt')}{turns}",
            counted(about.num_tokens, "token"),
            f"entropy {number(about.entropy_nats)} nats",
            f"looping {percent(about.looping)}",
            decodings or "decoding not known",
        ]
    )


def _decoding(decoding: Mapping[str, Any]) -> str:
    temperature = decoding.get("temperature")
    if temperature:
        words = [
            f"T={temperature}",
            f"top-k {decoding['top_k']}" if decoding.get("top_k") else None,
            f"top-p {decoding['top_p']}" if decoding.get("top_p", 1) != 1 else None,
            f"rule {decoding['rule']}" if decoding.get("rule") else None,
        ]
    else:
        words = ["temperature not known" if temperature is None else "greedy"]
    limit = decoding.get("max_new_tokens")
    return _join([*words, f"at most {counted(limit, 'token')}" if limit else None])


def title(run: Run) -> str:
    """Target, dtype and machine."""
    target, provenance = run.info.get("target", {}), run.info.get("provenance", {})
    device = provenance.get("device")
    return _join(
        [
            target.get("name") or "target not known",
            target.get("dtype") or provenance.get("dtype"),
            (provenance.get("cpu") or device) if device == "cpu" else device,
        ]
    )


def differences(section: Section) -> str | None:
    """What sets a section apart from the first one; None for the first."""
    if not section.differs:
        return None
    more = len(section.differs) - _MOST_DIFFERENCES
    rest = [f"and {more} more"] if more > 0 else []
    return "not to be compared with the first run: " + "; ".join(
        [*section.differs[:_MOST_DIFFERENCES], *rest]
    )


def warnings(section: Section, results: Sequence[WorkloadResult]) -> list[str]:
    """What is missing, failed or doubtful."""
    return [
        *(line for run in section.runs for line in doubts(run)),
        *failure_lines(section.union.failures),
        *_untimed(section.union),
        *_broken(section.union.requests),
        *(line for result in results for line in _unsure(result)),
    ]


def doubts(run: Run, file: str = "run.json") -> list[str]:
    """What may be wrong with a run as a whole.

    Args:
        run: the run.
        file: where its settings and provenance are filed.
    """
    lines, provenance = [], run.info.get("provenance", {})
    if is_edited(run.info):
        lines.append(
            f"{_name(run)}: {file} has been edited; what it says of settings and machine may not "
            "be true"
        )
    if run.missing_shards:
        lines.append(
            f"{len(run.missing_shards)} of {counted(len(run.info['shards']), 'shard')} "
            f"{are(len(run.missing_shards))} missing: "
            f"resume with `specbench run --resume {run.folder}`"
        )
    if run.stray_files:
        lines.append(
            f"{_name(run)} holds files that the run does not list, they are left out: "
            f"{_names(run.stray_files)}"
        )
    load, cores = _load(provenance), provenance.get("cores")
    if load is not None and cores is not None and load >= _BUSY * cores:
        lines.append(
            f"{_name(run)}: the machine was busy at the start (load average "
            f"{load:.1f} on {cores} cores); times may be off"
        )
    for resumed in provenance.get("resumed", []):
        if resumed["workers"] != provenance["workers"]:
            lines.append(
                f"{_name(run)}: begun by {counted(provenance['workers'], 'worker')}, gone on "
                f"with by {resumed['workers']}: tokens/s of its shards are not alike; a speed-up "
                "is within one"
            )
    if provenance.get("dirty"):
        lines.append(f"{_name(run)}: the code had changes that its commit does not hold")
    return lines


def _name(run: Run) -> str:
    return run.folder.absolute().name


def failure_lines(failures: Sequence[FailureRecord]) -> list[str]:
    """What failed and why, one line for each reason."""
    causes: dict[tuple[str, str, str], list[str]] = {}
    for failure in failures:
        cause = (failure.method or "every method", failure.workload, failure.reason)
        causes.setdefault(cause, []).append(failure.request)
    return [
        f"failed: {method} on {workload}, {_prompts(requests)}: {reason}"
        for (method, workload, reason), requests in causes.items()
    ]


def _untimed(run: Run) -> list[str]:
    timed = {(t.workload, t.method, request) for t in run.timings for request in t.requests}
    untimed: dict[tuple[str, str], list[str]] = {}
    for record in run.requests:
        if (record.workload, record.method, record.request) not in timed:
            untimed.setdefault((record.method, record.workload), []).append(record.request)
    return [
        f"not timed: {method} on {workload}, {_prompts(requests)}; its times and its "
        f"speed-up leave {'it' if len(requests) == 1 else 'them'} out"
        for (method, workload), requests in untimed.items()
    ]


def _broken(requests: Sequence[RequestRecord]) -> list[str]:
    """Where each broken method first leaves the reference, for its first few prompts."""
    broken: dict[tuple[str, str], list[str]] = {}
    for record in requests:
        if record.lossless == "broken":
            where = f"prompt {record.request}"
            if (split := record.divergence) is not None:
                gap = ""
                if split.gap is not None:
                    gap = f" (logit gap {split.gap:.3g}, a tie up to {split.tolerance:.3g})"
                found, expected = (
                    "the end" if token is None else str(token)
                    for token in (split.found, split.expected)
                )
                where += f" at {split.position}: {found} instead of {expected}{gap}"
            broken.setdefault((record.method, record.workload), []).append(where)
    return [
        f"BROKEN: {method} on {workload}, tokens differ from the target's: {_names(places)}; "
        "`specbench explain` shows the texts"
        for (method, workload), places in broken.items()
    ]


def _unsure(result: WorkloadResult) -> list[str]:
    """Where there are too few prompts for a verdict, or rounds differ by more than chance."""
    workload, lines = result.metrics.workload, []
    few = [m.method for m in result.methods if m.speed_up and m.speed_up.too_few]
    if few:
        lines.append(
            f"too few prompts: {_names(few)} on {workload}; a verdict takes {MIN_CLUSTERS} that "
            "were timed, or as many batches"
        )
    lines += [
        f"NOT in law: {method.method} on {workload}, its tokens are not as surprising as the "
        f"target's distribution says (p {method.law_p:.2g})"
        for method in result.methods
        if method.law_p is not None and method.law_p < LEAST_LAW_P
    ]
    for method in result.methods:
        interval = method.speed_up and method.speed_up.interval()
        rounds = method.speed_up_by_round
        if interval and rounds and max(rounds) - min(rounds) > interval.high - interval.low:
            lines.append(
                f"noisy: {method.method} on {workload}, its rounds range from {min(rounds):.2f}x "
                f"to {max(rounds):.2f}x, further than its interval; measure again on a quiet "
                "machine or with more --rounds"
            )
    return lines


def _prompts(requests: Sequence[str]) -> str:
    return f"prompt{'' if len(requests) == 1 else 's'} {_names(requests)}"


def _names(names: Sequence[str]) -> str:
    more = len(names) - _MOST_NAMED
    return ", ".join(names[:_MOST_NAMED]) + (f" and {more} more" if more > 0 else "")


def provenance_lines(section: Section) -> list[str]:
    """Target, machine, code and memory, and each run's command."""
    run = section.union
    provenance = run.info.get("provenance", {})
    peak = peak_memory_mib(run)
    return [
        f"target: {_target(run.info.get('target', {}), provenance)}",
        f"machine: {_machine(provenance)}",
        f"code: {_code(provenance)}",
        *([] if peak is None else [f"peak memory of a worker, with all methods: {peak:.0f} MiB"]),
        *(f"{_name(one)}: {_command(one.info.get('provenance', {}))}" for one in section.runs),
    ]


def _target(target: Mapping[str, Any], provenance: Mapping[str, Any]) -> str:
    parameters, size = target.get("num_parameters"), target.get("num_weight_bytes")
    return _join(
        [
            target.get("name"),
            target.get("dtype") or provenance.get("dtype"),
            None if parameters is None else f"{parameters / 1e6:.1f} M parameters",
            None if size is None else f"{size / 2**20:.1f} MiB of weights",
            target.get("note"),
            _prefixed("weights sha256", str(provenance.get("weights_sha256") or "")[:12]),
            _prefixed("chat template sha256", str(provenance.get("template_sha256") or "")[:12]),
        ]
    )


def _machine(provenance: Mapping[str, Any]) -> str:
    workers, threads = provenance.get("workers"), provenance.get("threads_per_worker")
    return _join(
        [
            _prefixed("device", provenance.get("device")),
            provenance.get("cpu"),
            None if workers is None else counted(workers, "worker"),
            None if threads is None else f"{counted(threads, 'thread')} each",
            provenance.get("platform"),
        ]
    )


def _code(provenance: Mapping[str, Any]) -> str:
    commit, packages = provenance.get("commit"), provenance.get("packages") or {}
    dirty = " with changes" if provenance.get("dirty") else ""
    return _join(
        [
            _prefixed("specbench", provenance.get("code_version")),
            f"commit {str(commit)[:12]}{dirty}" if commit else "commit not known",
            _prefixed("python", provenance.get("python")),
            *(_prefixed(name, packages.get(name)) for name in _PACKAGES),
        ]
    )


def _command(provenance: Mapping[str, Any]) -> str:
    """The command line, the start and the load then."""
    argv, load = provenance.get("argv"), _load(provenance)
    # Where the program lies on its machine says nothing.
    command = shlex.join([Path(argv[0]).name, *argv[1:]]) if argv else None
    return _join(
        [
            f"`{command}`" if command else "command not known",
            _prefixed("started", provenance.get("started")),
            None if load is None else f"load average {load:.2f}",
        ]
    )


def _load(provenance: Mapping[str, Any]) -> float | None:
    load = provenance.get("load_average")
    if isinstance(load, list | tuple):
        load = load[0] if load else None
    return None if load is None else float(load)


def _prefixed(word: str, value: Any) -> str | None:
    return None if value in (None, "") else f"{word} {value}"


def _join(parts: Iterable[Any]) -> str:
    return ", ".join(str(part) for part in parts if part) or "not known"
