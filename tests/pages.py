"""The documentation as data: its code blocks and what is said about them, its command lines and its links. Pure.

Comments directly before a block, which no reader sees, say how it is run (tests/test_docs.py):

    <!-- not run: reason -->           for code that needs GPUs or several hosts
    <!-- workers: 2 -->                a complete program, on so many workers
    <!-- file: train.py -->            a complete program, kept in the folder of the page under this name
    <!-- raises: Error: its text -->   it must fail, with this error and a text that has this part
    <!-- before: code -->              run first: what the reader is not to be bothered with
    <!-- output -->                    before a block of text: what the program above has printed; ... is anything
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MARKS = ("not run", "workers", "file", "raises", "before", "output")
SHELLS = ("sh", "bash", "console", "")

_FENCE = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```[ \t]*$", re.MULTILINE | re.DOTALL)
_COMMENT = re.compile(r"<!--\s*((?:(?!-->).)*?)\s*-->\s*\Z", re.DOTALL)
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_PATH = re.compile(r"`((?:docs|tests|src|examples|campaigns|chaos|conformance)/[\w./-]+)`")
_JOINED = ("|", "||", "&&", ";", "&")


@dataclass(frozen=True)
class Block:
    page: str
    line: int  # of its first line of code
    language: str
    code: str
    marks: dict[str, str] = field(default_factory=dict)

    @property
    def where(self) -> str:
        return f"{self.page}:{self.line}"


def written_pages() -> list[Path]:
    """Whose code is run."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def all_pages() -> list[Path]:
    return sorted({*written_pages(), *ROOT.glob("*.md")})


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def blocks_of(page: str, text: str) -> list[Block]:
    found, end = [], 0
    for fence in _FENCE.finditer(text):
        marks, before = {}, text[end : fence.start()]
        while comment := _COMMENT.search(before):
            name, _, value = comment.group(1).partition(":")
            if name.strip() not in MARKS:
                raise ValueError(f"{page}: <!-- {comment.group(1)} --> before a block: it takes {', '.join(MARKS)}")
            marks[name.strip()] = value.strip()
            before = before[: comment.start()]
        line = text.count("\n", 0, fence.start()) + 2
        found.append(Block(page, line, fence.group(1), fence.group(2), marks))
        end = fence.end()
    return found


def expected_output(text: str) -> re.Pattern[str]:
    """Any white space is one space, as lines of a page are cut where they are too long."""
    parts = [re.escape(" ".join(part.split())) for part in text.split("...")]
    return re.compile(r"\s?.*?\s?".join(parts), re.DOTALL)


def commands_of(block: Block, program: str = "lockstep") -> Iterator[list[str]]:
    """The arguments of every call of `program` in a block of shell."""
    if block.language not in SHELLS:
        return
    for line in block.code.replace("\\\n", " ").splitlines():
        line = line.strip().removeprefix("$ ")
        if not re.match(rf"(\w+=\S.*\s)?{program}(\s|$)", line):
            continue
        lexer = shlex.shlex(line, posix=True, punctuation_chars="|&;")
        lexer.whitespace_split = True
        command: list[str] = []
        for word in [*lexer, ";"]:
            if word in _JOINED:
                while command and re.match(r"\w+=", command[0]):
                    command = command[1:]
                if command[:1] == [program]:
                    yield command[1:]
                command = []
            else:
                command.append(word)


def links_of(text: str) -> list[str]:
    """To other files of the project, `#heading` and all."""
    return [link for link in _LINK.findall(_FENCE.sub("", text)) if not re.match(r"[a-z]+:", link)]


def named_paths(text: str) -> list[str]:
    """Paths that the text names without a link."""
    return _PATH.findall(_FENCE.sub("", text))


def headings_of(text: str) -> set[str]:
    """As they are written after a `#` in a link."""
    titles = re.findall(r"^#+ (.*)$", _FENCE.sub("", text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}
