"""Pages of headings, notes and tables, and how a page looks in a terminal and in Markdown.

A page knows nothing of benchmarks; whoever builds one decides every word and digit, so that no two
formats can disagree.
"""

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from rich import box
from rich.console import Console
from rich.rule import Rule
from rich.table import Table as RichTable
from rich.text import Text

MISSING = "-"
NO_BREAK = "\N{NO-BREAK SPACE}"
WIDTH = 100
"""Columns that every table fits into; also taken where the output is no terminal."""
_GAP = 2
"""Columns of space that each column of a table takes beside its text."""
_STYLES = {
    "": "",
    "good": "green",
    "bad": "red",
    "strong": "bold",
    "hot": "bold black on green",
    "warm": "black on bright_green",
    "cool": "black on bright_red",
    "cold": "bold black on red",
}


class Cell(NamedTuple):
    """A cell's text and what it means for the reader: ``good``, ``bad``, ``strong``, nothing, or,
    in a heat map, ``hot``, ``warm``, ``cool`` or ``cold``.

    The text breaks between words only, and not at a no-break space.
    """

    text: str
    tone: str = ""


class Column(NamedTuple):
    """A column's title, and whether it holds numbers, which stand to the right."""

    title: str
    numbers: bool = True


@dataclass(frozen=True)
class Heading:
    """A heading of level 1, 2, ..."""

    text: str
    level: int


@dataclass(frozen=True)
class Note:
    """A line of prose."""

    text: str
    tone: str = ""


@dataclass(frozen=True)
class Table:
    """A table; ``rows`` are as long as ``columns``."""

    title: str
    columns: Sequence[Column]
    rows: Sequence[Sequence[Cell]]


Page = Sequence[Heading | Note | Table]


def markdown(page: Page) -> str:
    """The page as GitHub's Markdown."""
    blocks: list[str] = []
    for element in page:
        match element:
            case Heading(text, level):
                blocks.append(f"{'#' * level} {text}")
            case Note(text) if blocks and blocks[-1].startswith("- "):
                blocks[-1] += f"\n- {text}"
            case Note(text):
                blocks.append(f"- {text}")
            case Table():
                blocks.append(_markdown_table(element))
    return "\n\n".join(blocks) + "\n"


def _markdown_table(table: Table) -> str:
    lines = [
        _markdown_row([column.title for column in table.columns]),
        "|" + "|".join("--:" if column.numbers else ":--" for column in table.columns) + "|",
        *(_markdown_row([cell.text for cell in row]) for row in table.rows),
    ]
    return "\n".join([f"{table.title}:\n", *lines] if table.title else lines)


def _markdown_row(texts: Sequence[str]) -> str:
    cells = (" ".join(text.split()).replace("|", "\\|") for text in texts)
    return "| " + " | ".join(cells) + " |"


def print_page(page: Page, console: Console) -> None:
    """Prints the page; where the console is no terminal it is made at least `WIDTH` wide."""
    if not console.is_terminal:
        console.width = max(console.width, WIDTH)
    for element in page:
        match element:
            case Heading(text, level) if level < 3:
                console.print()
                console.print(Rule(Text(text, "bold"), align="left"))
            case Heading(text):
                console.print(Text(f"\n{text}", "bold"))
            case Note(text, tone):
                console.print(Text(text, _STYLES[tone]))
            case Table():
                # A table that does not fit is wrapped by the terminal; rich would cut its digits.
                console.print(_rich_table(element, console.width), crop=False)


def _rich_table(table: Table, available: int) -> RichTable:
    """The table, wrapped here: rich would break within words and numbers."""
    widths = _widths(table, available)
    rich = RichTable(
        title=Text(table.title, "italic") if table.title else None,
        title_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
        width=sum(widths) + _GAP * len(widths),
    )
    for column, width in zip(table.columns, widths, strict=True):
        title = Text(_wrap(column.title, width))
        rich.add_column(title, justify="right" if column.numbers else "left", no_wrap=True)
    for row in table.rows:
        cells = zip(row, widths, strict=True)
        rich.add_row(*(Text(_wrap(cell.text, width), _STYLES[cell.tone]) for cell, width in cells))
    return rich


def _widths(table: Table, available: int) -> list[int]:
    """The columns' widths: of the widest cell, then narrowed where most can be gained, down to the
    longest word, until the table fits."""
    cells = [[row[i].text for row in table.rows] for i in range(len(table.columns))]
    least = [
        max(len(word) for text in [column.title, *texts] for word in text.split(" "))
        for column, texts in zip(table.columns, cells, strict=True)
    ]
    widths = [
        max([least[i], *map(len, cells[i])] + ([] if column.numbers else [len(column.title)]))
        for i, column in enumerate(table.columns)
    ]
    while sum(widths) + _GAP * len(widths) > available:
        slack = [width - low for width, low in zip(widths, least, strict=True)]
        if max(slack) == 0:
            break
        widths[slack.index(max(slack))] -= 1
    return widths


def _wrap(text: str, width: int) -> str:
    return "\n".join(textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False))
