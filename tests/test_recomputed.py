"""Every number of a table, computed again from the result files by pandas alone."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from specbench.records import Record, Run, write_run, write_shard
from specbench.report import render
from tests.made_runs import noisy_run

METHOD, WORKLOAD = "echo", "code"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A noisy run, filed."""
    folder = tmp_path_factory.mktemp("run")
    made = noisy_run(0, num_prompts=9, names=[WORKLOAD], folder=str(folder))
    write_run(folder, made.info)
    records: list[Record] = [*made.references, *made.requests, *made.timings]
    write_shard(folder, "code-0", records)
    return made


def recomputed(folder: Path) -> dict[str, Any]:
    """What the tables show of the method."""
    lines = [line for f in folder.glob("shards/*.jsonl") for line in f.read_text().splitlines()]
    table = pd.DataFrame(map(json.loads, lines))
    mine = table[(table.method == METHOD) & (table.workload == WORKLOAD)]
    out = mine[mine.kind == "request"].set_index("request")
    steps = out.steps.explode().apply(pd.Series).set_axis([*"ndacm"], axis=1).astype(float)
    total = steps.sum()
    by_prompt = steps.groupby(level=0).agg(c=("c", "sum"), n=("c", "size"))
    times = table[(table.kind == "timing") & (table.workload == WORKLOAD)].copy()
    times["batch"] = times.requests.map(tuple)
    pair = times.groupby(["method", "batch"])[["num_tokens", "decode_s", "prefill_s"]].median()
    base, own = pair.loc["vanilla"], pair.loc[METHOD]
    left_out = [_speed_up(base.drop(batch), own.drop(batch)) for batch in own.index]
    share, weights = 1 - 1 / len(own), base.decode_s**2
    spread = np.sqrt(share * ((np.log(left_out) - np.log(left_out).mean()) ** 2).sum())
    freedom = share * weights.sum() ** 2 / (weights**2).sum()
    reach = np.exp(spread * stats.t.ppf(0.975, freedom))
    passes = times[times.method == METHOD]
    flops = out.flops.apply(pd.Series)
    seconds = passes.decode_s.sum()
    speed = _speed_up(base, own)
    p_value = 2 * stats.t.sf(abs(np.log(speed)) / spread, freedom)
    visible = np.expm1(spread * stats.t.ppf([0.975, 0.8], freedom).sum())
    blind = f"inconclusive, blind below {visible:.0%}"
    return {
        "tau": f"{total.c / len(steps):.2f}",
        "tau by prompt": f"{(by_prompt.c / by_prompt.n).mean():.2f}",
        "acceptance": f"{total.a / total.d:.1%}",
        "speed-up": f"{speed:.2f}x [{speed / reach:.2f}, {speed * reach:.2f}]",
        "verdict": ("slower", "faster")[int(speed > 1)] if p_value <= 0.05 else blind,
        "tokens/s": f"{own.num_tokens.sum() / own.decode_s.sum():.1f}",
        "split": "/".join(
            f"{100 * passes[phase].sum() / seconds:.0f}"
            for phase in ("draft_s", "forward_s", "bookkeeping_s")
        ),
        "lossless": f"exact {(out.lossless == 'exact').sum()}/{len(out)}",
        "depth": f"{steps.d.mean():.2f}",
        "positions": [_conditional(steps, p) for p in (1, 2, 3)],
        "forwards": f"{passes.num_forwards.sum() / passes.num_tokens.sum():.3f}",
        "nodes": f"{total.n / total.c:.2f}",
        "wasted": f"{1 - total.a / total.n:.1%}",
        "step ms": f"{1000 * seconds / passes.num_forwards.sum():.1f}",
        "prefill ms": f"{1000 * own.prefill_s.sum() / len(own):.1f}",
        "flops": f"{(flops.verify + flops.draft).sum() / flops.vanilla.sum():.2f}",
        "rejected": f"{flops.rejected.sum() / (flops.verify + flops.draft).sum():.1%}",
        "theory": _theory(steps, times[times.method == "vanilla"].sum(numeric_only=True), passes),
    }


def _theory(steps: pd.DataFrame, base: Any, passes: pd.DataFrame) -> list[str]:
    reached = [_reached(steps, p) for p in range(1, int(steps.d.max()) + 1)]
    taken = [(rows.a >= p).sum() for p, rows in enumerate(reached, start=1)]
    alpha = sum(taken) / sum(map(len, reached))
    chances = np.cumprod([t / len(rows) for t, rows in zip(taken, reached, strict=True)])
    own = passes.sum(numeric_only=True)
    per_token = own.num_tokens / own.num_forwards
    step = [1000 * side.filter(like="_s") / side.num_forwards for side in (base, own)]
    vanilla, mine = (side.draft_s + side.forward_s + side.bookkeeping_s for side in step)
    beyond = [(step[1][p] - step[0][p]) / per_token for p in ("draft_s", "forward_s")]
    other = (step[1].bookkeeping_s - step[0].bookkeeping_s) / per_token
    a_token = vanilla * base.num_forwards / base.num_tokens
    return [
        f"{sum(alpha**k for k in range(round(steps.d.mean()) + 1)):.2f}",
        f"{np.mean([1 + chances[: int(d)].sum() for d in steps.d]):.2f}",
        f"{steps.c.sum() / len(steps):.2f}",
        *(f"{ms:.1f}" for ms in (a_token, vanilla / per_token, *beyond, other)),
        f"{mine / per_token:.1f}",
        f"{a_token / (vanilla / per_token):.2f}x",
        f"{a_token / (mine / per_token):.2f}x",
    ]


def _speed_up(base: Any, own: Any) -> float:
    rate = own.num_tokens.sum() / own.decode_s.sum()
    return float(rate * base.decode_s.sum() / base.num_tokens.sum())


def _conditional(steps: pd.DataFrame, p: int) -> str:
    reached = _reached(steps, p)
    return f"{(reached.a >= p).sum() / len(reached):.1%}"


def _reached(steps: pd.DataFrame, p: int) -> pd.DataFrame:
    offered = steps[steps.d >= p]
    return offered[np.minimum(offered.a, offered.c - 1) >= p - 1]


def rows(text: str) -> list[list[str]]:
    """The cells of the method's rows, in the order of the tables."""
    found = [line for line in text.splitlines() if line.startswith(f"| {METHOD} |")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in found]
    return [[" ".join(cell.replace(" %", "%").split()) for cell in row] for row in cells]


def test_every_number_of_a_report_is_recomputed_from_the_files(run: Run) -> None:
    want = recomputed(run.folder)
    results, positions, costs, theory = rows(render([run], "md"))
    assert results[1:] == [
        want["tau"],
        want["acceptance"],
        f"{want['speed-up']} {want['verdict']}",
        want["tokens/s"],
        want["split"],
        want["lossless"],
        "0",
    ]
    assert positions[1:] == [want["tau by prompt"], want["depth"], *want["positions"]]
    shown = ("forwards", "nodes", "wasted", "flops", "rejected", "step ms", "prefill ms")
    assert costs[1:-1] == [want[name] for name in shown]
    assert theory[1:] == want["theory"]


def test_every_number_of_the_committed_leaderboard_is_recomputed() -> None:
    """What its first columns show of one method on one workload, from the committed files."""
    folder = Path(__file__).parent.parent / "results" / "smollm2-135m-epyc-2core"
    lines = [line for f in folder.glob("shards/*.jsonl") for line in f.read_text().splitlines()]
    table = pd.DataFrame(map(json.loads, lines))
    out = table[(table.kind == "request") & (table.method != "vanilla")]
    steps = out.set_index(["workload", "method"]).steps.explode().apply(pd.Series)
    sums = steps.astype(float).groupby(level=[0, 1]).agg(["sum", "size"])
    page = (folder.parent / "leaderboard.md").read_text()
    for (workload, method), row in sums.iterrows():
        assert method
        tau, rate = row[3, "sum"] / row[3, "size"], row[2, "sum"] / row[1, "sum"]
        part = page.partition(f"#### {workload}\n")[2].partition("####")[0]
        (line,) = (one for one in part.splitlines() if f"| {method}" in one)
        assert f"| {tau:.2f} | {100 * rate:.1f} % |" in line
