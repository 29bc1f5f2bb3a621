"""Made-up records and runs, with numbers that can be worked out by hand."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from specbench.records import (
    Divergence,
    FailureRecord,
    Flops,
    Record,
    ReferenceRecord,
    RequestRecord,
    ResourceRecord,
    Run,
    TimingRecord,
    read_run,
    write_run,
    write_shard,
)
from specbench.stats import Floats

GREEDY = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "rule": "greedy", "max_new_tokens": 64}
INFO: dict[str, Any] = {
    "settings": {"seed": 0, "rounds": 2, "max_new_tokens": 64, "methods": ["vanilla", "echo"]},
    "provenance": {
        "code_version": "0.1.0",
        "commit": "0123456789abcdef",
        "dirty": False,
        "argv": ["/somewhere/bin/specbench", "run", "--workloads", "code, creative"],
        "python": "3.11.7",
        "packages": {"torch": "2.13.0", "transformers": "5.24.0"},
        "cpu": "Made-up CPU",
        "device": "cpu",
        "threads_per_worker": 1,
        "workers": 2,
        "load_average": 0.25,
        "started": "2026-01-02T03:04:05Z",
        "weights_sha256": "ab" * 32,
    },
    "target": {"name": "tiny", "dtype": "float32", "num_parameters": 1_500_000},
    "methods": {
        "vanilla": {"label": "", "extra_bytes": 0},
        "echo": {"label": "copies", "extra_bytes": 3 * 2**20},
    },
    "workloads": {"code": {"kind": "code"}, "creative": {"kind": "creative"}},
}


def reference(
    request: str,
    *,
    workload: str = "code",
    num_tokens: int = 4,
    entropy_nats: float = 0.5,
    looping: bool = False,
    decoding: dict[str, Any] = GREEDY,
) -> ReferenceRecord:
    """The reference of one request: tokens 0, 1, 2, ..."""
    return ReferenceRecord(
        workload=workload,
        workload_kind=workload,
        request=request,
        num_prompt_tokens=3,
        tokens=list(range(num_tokens)),
        finish="length",
        text="",
        entropy_nats=entropy_nats,
        looping=looping,
        decoding=decoding,
    )


def output(
    method: str,
    request: str,
    *steps: tuple[int, int, int, int],
    workload: str = "code",
    lossless: str = "exact",
    divergence: Divergence | None = None,
) -> RequestRecord:
    """What a method made of a request, from its steps (nodes, depth, accepted, committed). A
    node's forward is one FLOP, its draft half of one."""
    nodes, accepted, committed = (sum(step[i] for step in steps) for i in (0, 2, 3))
    return RequestRecord(
        workload=workload,
        request=request,
        method=method,
        tokens=list(range(sum(step[3] for step in steps))),
        finish="length",
        steps=[[*step, step[2]] for step in steps],
        lossless=lossless,
        divergence=divergence,
        flops=Flops(
            verify=len(steps) + nodes,
            draft=nodes / 2,
            rejected=1.5 * (nodes - accepted),
            vanilla=committed,
        ),
    )


def timing(
    method: str,
    requests: Sequence[str],
    decode_s: float,
    *,
    round: int = 0,
    workload: str = "code",
    num_tokens: int = 4,
    num_forwards: int = 4,
    shares: tuple[float, float, float] = (0.25, 0.5, 0.25),
    prefill_s: float = 0.5,
) -> TimingRecord:
    """A timed pass whose decode time is split by ``shares`` into draft, forward and bookkeeping."""
    return TimingRecord(
        workload=workload,
        requests=list(requests),
        method=method,
        round=round,
        order=0,
        num_tokens=num_tokens,
        num_forwards=num_forwards,
        prefill_s=prefill_s,
        decode_s=decode_s,
        draft_s=decode_s * shares[0],
        forward_s=decode_s * shares[1],
        bookkeeping_s=decode_s * shares[2],
    )


def paired_times(
    generator: np.random.Generator,
    num_prompts: int,
    ratio: float,
    *,
    own: float = 0.15,
    noise: float = 0.05,
) -> Floats:
    """Times of prompts of unequal lengths: [C, 4], as `speed_up` takes them.

    Args:
        ratio: the speed-up, of so many prompts that chance is none.
        own: how much it varies by prompt, in the logarithm.
        noise: of one pass, likewise; about what two workers on two cores show.
    """
    tokens = generator.lognormal(4.5, 0.5, num_prompts).round() + 1
    moods = generator.normal(0, noise, (2, num_prompts))
    own_ratio = ratio * np.exp(generator.normal(own**2 / 2, own, num_prompts))
    baseline_s = 0.03 * tokens * np.exp(moods[0])
    method_s = 0.03 * tokens / own_ratio * np.exp(moods[1])
    return np.stack([baseline_s, tokens, method_s, tokens], axis=1)


def failure(method: str | None, request: str, reason: str = "out of memory") -> FailureRecord:
    """A request of the workload code that failed."""
    return FailureRecord(workload="code", request=request, method=method, reason=reason)


def resource(peak_memory_mib: float) -> ResourceRecord:
    """A worker's use of memory."""
    return ResourceRecord(peak_memory_mib=peak_memory_mib, num_threads=1, load_average=0.5)


def made_run(*records: Record, folder: str = "made", **info: Any) -> Run:
    """A run in memory, of a fixed fingerprint but for the parts of ``info`` that are given."""
    run = Run(Path(folder), {**INFO, "shards": ["code-0"], **info})
    lists: dict[type, list[Any]] = {
        ReferenceRecord: run.references,
        RequestRecord: run.requests,
        TimingRecord: run.timings,
        FailureRecord: run.failures,
        ResourceRecord: run.resources,
    }
    for record in records:
        lists[type(record)].append(record)
    return run


def paired(
    method: str,
    speed_up: float,
    *,
    num_prompts: int = 6,
    workload: str = "code",
    lossless: str = "exact",
    entropy_nats: float = 0.5,
) -> list[Record]:
    """References, vanilla and one method on some prompts; on prompt i vanilla takes 4 + i seconds,
    the method 1 / ``speed_up`` of that."""
    records: list[Record] = []
    for i in range(num_prompts):
        name = f"{workload}-{i}"
        records += [
            reference(name, workload=workload, entropy_nats=entropy_nats),
            output("vanilla", name, *[(0, 0, 0, 1)] * 4, workload=workload),
            output(method, name, (3, 3, 2, 3), (1, 1, 0, 1), workload=workload, lossless=lossless),
            timing("vanilla", [name], 4 + i, workload=workload),
            timing(method, [name], (4 + i) / speed_up, workload=workload, num_forwards=2),
        ]
    return records


def noisy_run(
    noise_seed: int,
    *,
    num_prompts: int = 50,
    names: Sequence[str] = ("code", "creative"),
    slower: float = 1.0,
    chance: float = 0.5,
    draft_seed: int = 0,
    noise: float = 0.05,
    decoding: dict[str, Any] = GREEDY,
    method: str = "echo",
    **info: Any,
) -> Run:
    """Vanilla and a method on prompts that are the same in every such run, in two rounds.

    Args:
        noise_seed: of the times.
        names: of the workloads.
        slower: by how much the method's times are longer.
        chance: that one more of three drafted tokens is accepted; 0.5 is a tau of about 1.9.
        draft_seed: of what is accepted.
        noise: of one pass, in the logarithm.
    """
    records: list[Record] = []
    for number, workload in enumerate(names):
        lengths = np.random.default_rng((1, number)).integers(20, 65, num_prompts)
        own = 1.3 * np.exp(np.random.default_rng((2, number)).normal(0, 0.2, num_prompts))
        drafts = np.random.default_rng((3, number, draft_seed))
        times = np.random.default_rng((4, number, noise_seed))
        moods = np.exp(times.normal(0, noise, (num_prompts, 4)))
        for i, length in enumerate(lengths.tolist()):
            name = f"{workload}-{i}"
            steps = _steps(drafts, length, chance)
            records += [
                reference(name, workload=workload, num_tokens=length, decoding=decoding),
                output("vanilla", name, *[(0, 0, 0, 1)] * length, workload=workload),
                output(method, name, *steps, workload=workload),
            ]
            seconds = {"vanilla": 0.02 * length, method: 0.02 * length / float(own[i]) * slower}
            for j, (one, round_) in enumerate((m, r) for m in seconds for r in (0, 1)):
                records.append(
                    timing(
                        one,
                        [name],
                        seconds[one] * float(moods[i, j]),
                        round=round_,
                        workload=workload,
                        num_tokens=length,
                        num_forwards=length if one == "vanilla" else len(steps),
                    )
                )
    about = {method: {"label": "", "extra_bytes": 0}, "vanilla": INFO["methods"]["vanilla"]}
    asked = {name: {"kind": name, "sha256": name} for name in names}
    return made_run(*records, **({"methods": about, "workloads": asked} | info))


def _steps(
    drafts: np.random.Generator, num_tokens: int, chance: float
) -> list[tuple[int, int, int, int]]:
    """Steps that offer three tokens each and commit so many in all."""
    steps = []
    while num_tokens:
        accepted = min(int(np.argmin([*(drafts.random(3) < chance), False])), num_tokens - 1)
        steps.append((3, 3, accepted, accepted + 1))
        num_tokens -= accepted + 1
    return steps


def filed_run(folder: Path, records: Sequence[Record], **info: Any) -> Run:
    """A run written to its folder and read again."""
    write_run(folder, {**INFO, "shards": ["code-0"], **info})
    write_shard(folder, "code-0", records)
    return read_run(folder)
