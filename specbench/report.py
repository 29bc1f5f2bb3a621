"""Run folders -> what is shown: tables for the terminal, Markdown, JSON and the leaderboard.

It measures nothing: every number is computed from the records by `metrics` and `stats`.
``python -m specbench.report results/`` writes ``results/leaderboard.md``.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import Any

from rich.console import Console

from specbench.columns import (
    costs_table,
    positions_table,
    prediction_table,
    ranking_table,
    results_table,
)
from specbench.definitions import DEFINITIONS
from specbench.describe import describe_workload, differences, provenance_lines, title, warnings
from specbench.files import write_atomically
from specbench.merge import Section, sections
from specbench.metrics import Position, peak_memory_mib
from specbench.records import Run, read_run
from specbench.stats import Estimate
from specbench.summary import MethodResult, WorkloadResult, summarise
from specbench.tables import Cell, Column, Heading, Note, Page, Table, markdown, print_page

FORMATS = ("md", "json")
LOW_ENTROPY_NATS = 1.0
"""Below this a workload is of low entropy to the leaderboard."""
_HOW_TO_READ = (
    "A table ranks the methods on one workload by speed-up over vanilla, which decoded the same "
    "prompts in the same process, in turns with them.",
    "A rank is no surer than its interval: methods whose intervals overlap much are not told apart "
    "here, and `inconclusive` means that even the sign is open. Verdicts are corrected for the "
    "number of speed-ups in a section, intervals are not.",
    "BROKEN and LOSSY outputs are not the target's, so their methods have no rank.",
    "Numbers of different sections come from different targets, machines or settings: do not "
    "compare them.",
    "Made by `make leaderboard` from the run folders named below.",
)


def render(runs: Sequence[Run], format: str) -> str:
    """The report on some runs as text, ``md`` or ``json``.

    Raises:
        ValueError: an unknown format, no runs, or runs that contradict each other.
    """
    if format not in FORMATS:
        raise ValueError(f"unknown format {format!r}; valid: {', '.join(FORMATS)}")
    found = _sections(runs)
    return markdown(_report(found)) if format == "md" else _as_json(found)


def print_report(runs: Sequence[Run], console: Console, *, define: bool = True) -> None:
    """Prints the report on some runs, the definitions behind it where they are wanted.

    Raises:
        ValueError: no runs, or runs that contradict each other.
    """
    print_page(_report(_sections(runs), define), console)


def render_leaderboard(runs: Sequence[Run]) -> str:
    """The leaderboard as Markdown: for each target and machine the methods ranked by speed-up.

    Raises:
        ValueError: no runs, or runs that contradict each other.
    """
    return markdown(_leaderboard(_sections(runs)))


def main_leaderboard(results_folder: Path) -> None:
    """Writes ``leaderboard.md`` from the runs in the folders right below; baselines, sweeps and the
    like lie deeper.

    Raises:
        ValueError: there are no runs, or one cannot be read.
    """
    folders = sorted(path.parent for path in results_folder.glob("*/run.json"))
    if not folders:
        raise ValueError(f"{results_folder} holds no runs; valid: a folder above run folders")
    page = render_leaderboard([read_run(folder) for folder in folders])
    write_atomically(results_folder / "leaderboard.md", page)


def _sections(runs: Sequence[Run]) -> list[Section]:
    if not runs:
        raise ValueError("there is no run to report")
    return sections(runs)


def _report(found: Sequence[Section], define: bool = True) -> Page:
    page: list[Heading | Note | Table] = []
    for section in found:
        page.append(Heading(title(section.union), 1))
        results = summarise(section.union)
        page += _remarks(section, results)
        for workload in results:
            page += _workload(workload)
        page.append(Heading("How it was measured", 2))
        page += [Note(line) for line in provenance_lines(section)]
    return [*page, Heading("Definitions", 2), _definitions()] if define else page


def _remarks(section: Section, results: Sequence[WorkloadResult]) -> Page:
    apart = differences(section)
    first = [Note(apart, "strong")] if apart else []
    return [*first, *(Note(line, "bad") for line in warnings(section, results))]


def _workload(workload: WorkloadResult) -> Page:
    methods = workload.methods
    draw = (results_table, positions_table, costs_table, prediction_table)
    tables = [table(methods) for table in draw]
    return [
        Heading(workload.metrics.workload, 2),
        Note(describe_workload(workload)),
        *(table for table in tables if table.rows),
    ]


def _definitions() -> Table:
    columns = [Column("word", numbers=False), Column("meaning", numbers=False)]
    return Table("", columns, [[Cell(word), Cell(text)] for word, text in DEFINITIONS.items()])


def _leaderboard(found: Sequence[Section]) -> Page:
    page: list[Heading | Note | Table] = [Heading("Leaderboard", 1)]
    page += [Note(line) for line in _HOW_TO_READ]
    for section in found:
        page.append(Heading(title(section.union), 2))
        page += [Note(line) for line in provenance_lines(section)]
        results = summarise(section.union)
        page += _remarks(section, results)
        for tier, workloads in groupby(results, _tier):
            page.append(Heading(tier, 3))
            for workload in workloads:
                page += _ranking(workload)
    return [*page, Heading("Definitions", 2), _definitions()]


def _tier(workload: WorkloadResult) -> str:
    nats = workload.metrics.entropy_nats
    if nats is None:
        return "Entropy not known"
    if nats < LOW_ENTROPY_NATS:
        return f"Low entropy (below {LOW_ENTROPY_NATS} nats)"
    return f"High entropy ({LOW_ENTROPY_NATS} nats and more)"


def _ranking(workload: WorkloadResult) -> Page:
    return [
        Heading(workload.metrics.workload, 4),
        Note(describe_workload(workload)),
        ranking_table(workload.methods),
    ]


def _as_json(found: Sequence[Section]) -> str:
    """All numbers unrounded, with what they are made of."""
    document = {
        "definitions": DEFINITIONS,
        "sections": [_section_values(section) for section in found],
    }
    return json.dumps(document, indent=1) + "\n"


def _section_values(section: Section) -> dict[str, Any]:
    results = summarise(section.union)
    return {
        "runs": [{"folder": str(run.folder), **run.info} for run in section.runs],
        "differs": list(section.differs),
        "warnings": warnings(section, results),
        "missing_shards": section.union.missing_shards,
        "failures": [asdict(failure) for failure in section.union.failures],
        "peak_memory_mib": peak_memory_mib(section.union),
        "workloads": [
            {
                **asdict(workload.metrics),
                "decodings": list(workload.decodings),
                "methods": [_method_values(method) for method in workload.methods],
            }
            for workload in results
        ],
    }


def _method_values(method: MethodResult) -> dict[str, Any]:
    values = asdict(method)
    if method.acceptance:
        positions = method.acceptance.positions
        values["acceptance"]["positions"] = [_position_values(position) for position in positions]
    if method.speed_up:
        values["speed_up"] |= _estimate_values(method.speed_up)
    return values


def _estimate_values(estimate: Estimate) -> Mapping[str, Any]:
    interval, simultaneous = estimate.interval(), estimate.simultaneous
    return {
        "low": interval and interval.low,
        "high": interval and interval.high,
        "simultaneous": simultaneous and simultaneous._asdict(),
        "p": estimate.p_value,
        "smallest_visible": estimate.smallest_visible,
        "verdict": estimate.verdict,
    }


def _position_values(position: Position) -> Mapping[str, float | None]:
    return {
        **position._asdict(),
        "unconditional": position.unconditional,
        "conditional": position.conditional,
    }


def main(arguments: Sequence[str]) -> str | None:
    """Writes the leaderboard of the results folder that is named.

    Returns:
        What went wrong, if anything did.
    """
    if len(arguments) != 1:
        return "usage: python -m specbench.report RESULTS_FOLDER"
    try:
        main_leaderboard(Path(arguments[0]))
    except ValueError as error:
        return f"error: {error}"
    return None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
