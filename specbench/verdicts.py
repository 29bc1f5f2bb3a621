"""What a check looks like: a page for people, JUnit XML for a CI server."""

from collections.abc import Sequence
from itertools import groupby
from xml.etree import ElementTree

from specbench.check import Check, worst
from specbench.judge import Finding, Verdict
from specbench.messages import counted
from specbench.tables import Cell, Column, Heading, Note, Page, Table, markdown

_TONES = {Verdict.PASS: "good", Verdict.FAIL: "bad", Verdict.INCONCLUSIVE: "strong"}
_WORDS = [
    Column(title, numbers=False)
    for title in ("method", "workload", "question", "before", "now", "verdict", "of before")
]


def page(check: Check) -> Page:
    """The verdict, those of each method on each workload, and how they came about: of the hard
    part what did not pass, of the soft part everything."""
    hard, soft = ([f for f in check.findings if f.is_hard is is_hard] for is_hard in (True, False))
    heading = f"{check.verdict}: {check.run.folder} against {check.baseline.folder}"
    notes = [
        *check.notes,
        f"hard part {worst(hard)}, exact: {counted(len(hard), 'finding')}",
        f"soft part {worst(soft)}, no more than {100 * check.margin:g} % below: "
        f"{counted(len(soft), 'finding')}"
        if soft
        else "soft part left out",
    ]
    return [
        Heading(heading, 1),
        *(Note(note) for note in notes),
        _summary(check.findings),
        *_details("hard part, what did not pass", [f for f in hard if f.verdict != Verdict.PASS]),
        *_details("soft part", soft),
    ]


def _summary(findings: Sequence[Finding]) -> Table:
    columns = [Column(title, numbers=False) for title in ("method", "workload", "hard", "soft")]
    rows = []
    for (method, workload), group in groupby(findings, lambda f: (f.method, f.workload)):
        of_case = list(group)
        verdicts = [
            _cell(worst([f for f in of_case if f.is_hard is is_hard]))
            if any(f.is_hard is is_hard for f in of_case)
            else Cell("-")
            for is_hard in (True, False)
        ]
        rows.append([Cell(method), Cell(workload), *verdicts])
    return Table("", columns, rows)


def _details(title: str, findings: Sequence[Finding]) -> list[Table]:
    rows = [
        [
            *map(Cell, (f.method, f.workload, f.question, f.before, f.now)),
            _cell(f.verdict),
            Cell(f.reason),
        ]
        for f in findings
    ]
    return [Table(title, _WORDS, rows)] if rows else []


def _cell(verdict: Verdict) -> Cell:
    return Cell(verdict.value, _TONES[verdict])


def as_markdown(check: Check) -> str:
    """The page, for a pull request."""
    return markdown(page(check))


def as_junit(check: Check) -> str:
    """A test case for each finding; what is inconclusive counts as skipped."""
    suite = ElementTree.Element("testsuite", name="specbench check")
    counts = {verdict: 0 for verdict in Verdict}
    for finding in check.findings:
        counts[finding.verdict] += 1
        part = "hard" if finding.is_hard else "soft"
        case = ElementTree.SubElement(
            suite,
            "testcase",
            classname=f"{part}.{finding.method}.{finding.workload}",
            name=finding.question,
        )
        if finding.verdict != Verdict.PASS:
            kind = "failure" if finding.verdict == Verdict.FAIL else "skipped"
            words = f"{finding.before} -> {finding.now}; {finding.reason}".rstrip("; ")
            ElementTree.SubElement(case, kind, message=words)
    suite.set("tests", str(len(check.findings)))
    suite.set("failures", str(counts[Verdict.FAIL]))
    suite.set("skipped", str(counts[Verdict.INCONCLUSIVE]))
    ElementTree.indent(suite)
    return ElementTree.tostring(suite, encoding="unicode", xml_declaration=True) + "\n"
