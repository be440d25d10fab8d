"""Finds the exception, and the place in the user's own code, in the text of a traceback. Pure.

Text is all that a launcher has from a program without Lockstep, or if the exception came from a loader process.
"""

from __future__ import annotations

import re
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from traceback import FrameSummary, StackSummary, TracebackException
from typing import Final

BY_CAUSE: Final = "The above exception was the direct cause of the following exception:"
MEANWHILE: Final = "During handling of the above exception, another exception occurred:"
SHOWN_LINES: Final = 12  # of an exception's message

_BEGIN: Final = "Traceback (most recent call last):"
_FRAME: Final = re.compile(r'^\s*File "(?P<file>[^"]+)", line (?P<line>\d+)(?:, in (?P<function>.+))?$')
_NOT_THE_EXCEPTION: Final = re.compile(
    r"^(\[[A-Z]\d{4} |lockstep: |Exception ignored|terminate called|in the loader process)"
)
_BELOW_PROGRAMS: Final = ("<frozen", f"{Path(__file__).parents[1]}/", f"{sysconfig.get_paths()['stdlib']}/")


@dataclass(frozen=True)
class Frame:
    file: str
    line: int
    function: str = ""
    source: str = ""


@dataclass(frozen=True)
class ParsedError:
    what: str = ""  # the exception as in the last lines of a traceback; "" if there was none
    cause: str = ""  # the exception that caused it, unless its text is the same
    frame: Frame | None = None  # in the user's own code


def read(text: Sequence[str]) -> ParsedError:
    """Parses the last traceback in these lines, with its causes."""
    sections, by_cause = [[]], [False]  # type: tuple[list[list[str]], list[bool]]
    for line in text:
        if line.strip() in (BY_CAUSE, MEANWHILE):
            sections.append([])
            by_cause.append(line.strip() == BY_CAUSE)
        else:
            sections[-1].append(line)
    if not any(_BEGIN in line for line in text):
        return ParsedError()
    first = last = len(sections) - 1
    while first > 0 and by_cause[first]:
        first -= 1
    frames = [find_frame(section) for section in sections]
    # The deepest cause with a frame of the user's, else the next one above it.
    frame = next((frames[n] for n in range(first, last + 1) if frames[n] is not None), None)
    if frame is None:  # no frame of the user's in the last exception; try those during whose handling it was raised
        frame = next((one for one in reversed(frames) if one is not None), None)
    what, cause = _exception(sections[last]), _exception(sections[first]) if first != last else ""
    if frames[first] is None or cause in what:  # the outer exception explains a cause inside torch or lockstep
        cause = ""
    return ParsedError(what, cause, frame)


def find_frame(lines: Sequence[str]) -> Frame | None:
    """Returns the innermost frame that is not in torch, lockstep, another package or the standard library."""
    found = None
    for n, line in enumerate(lines):
        match = _FRAME.match(line)
        if match is not None and is_users(match["file"]):
            after = lines[n + 1].strip() if n + 1 < len(lines) else ""
            source = "" if _FRAME.match(lines[n + 1] if after else "") else after
            found = Frame(match["file"], int(match["line"]), match["function"] or "", source)
    return found


def cut(error: TracebackException) -> int:
    """Removes, in place, all frames that are not the user's own, also from its causes. Returns the number removed.

    A cause without frames of the user's is removed: the outer exception explains it.
    """
    kept = _kept(error.stack)
    left_out = len(error.stack) - len(kept)
    error.stack = StackSummary.from_list(kept)
    notes = error.__notes__ or []
    for n, note in enumerate(notes):
        notes[n] = cut_text(note)
        left_out += len(_frames(note)) - len(_frames(notes[n]))
    for one in error.exceptions or ():
        left_out += cut(one)
    cause = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    if cause is None:
        return left_out
    if _is_about_users(cause):
        return left_out + cut(cause)
    error.__cause__, error.__suppress_context__ = None, True
    return left_out + len(cause.stack)


def _kept(stack: Sequence[FrameSummary]) -> list[FrameSummary]:
    """The user's frames; if there are none (a program installed as a package), those of other libraries."""
    users = [frame for frame in stack if is_users(frame.filename)]
    others = [frame for frame in stack if not is_foundation(frame.filename)]
    return users or others or list(stack[-1:])


def _is_about_users(error: TracebackException) -> bool:
    chain = (error.__cause__, error.__context__)
    files = [frame.filename for frame in error.stack] + [
        file for note in error.__notes__ or () for file in _frames(note)
    ]
    return any(map(is_users, files)) or any(_is_about_users(one) for one in chain if one)


def _frames(text: str) -> list[str]:
    """Returns the file of each frame in a text."""
    return [match["file"] for line in text.splitlines() if (match := _FRAME.match(line))]


def cut_text(text: str) -> str:
    """Removes frames that are not the user's from a traceback that is text: that of a loader process."""
    kept, is_shown = [], True
    for line in text.splitlines(keepends=True):
        match = _FRAME.match(line.rstrip("\n"))
        if match is not None:
            is_shown = is_users(match["file"])
        elif not line.startswith("    "):  # lines that belong to a frame are indented further
            is_shown = True
        kept += [line] if is_shown else []
    return "".join(kept)


def is_foundation(file: str) -> bool:
    """Whether the file belongs to torch, lockstep or Python itself."""
    package = re.search(r"/(?:site|dist)-packages/(\w+)/", file)
    return package[1] in ("torch", "lockstep") if package is not None else file.startswith(_BELOW_PROGRAMS)


def is_users(file: str) -> bool:
    return not file.startswith(_BELOW_PROGRAMS) and "/site-packages/" not in file and "/dist-packages/" not in file


def shorten(what: str) -> str:
    """Keeps the first and last line of a message into which torch has put the traceback of a loader process."""
    first, found, rest = what.partition("\nOriginal Traceback")
    lines = [line for line in rest.splitlines() if line and not line[0].isspace()]
    return f"{first}\n{lines[-1]}" if found and lines else what


def _exception(section: Sequence[str]) -> str:
    """Returns type and message of the exception: the lines after the frames that are not indented."""
    starts = [n for n, line in enumerate(section) if _BEGIN in line]
    lines = section[starts[0] + 1 :] if starts else section
    begin = next((n for n, line in enumerate(lines) if line and not line[0].isspace()), len(lines))
    kept: list[str] = []
    for line in lines[begin:]:
        if line.startswith(_BEGIN) or _NOT_THE_EXCEPTION.match(line):
            break
        kept.append(line.rstrip())
    text = shorten("\n".join(kept)).strip()
    text = "\n".join(text.splitlines()[:SHOWN_LINES])
    # Python prints the module of a class that is not built in; it is of no use for classes of lockstep and torch.
    return re.sub(r"^(?:lockstep|torch)(?:\.\w+)+\.(?=\w+(?::|$))", "", text)
