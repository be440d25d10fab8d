"""What a traceback is about: the exception, and the place in the user's own code. Pure.

It is read from the text, which is all that a launcher has of a worker that knows nothing of us, or whose exception came
from a loader process.
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
SHOWN_LINES: Final = 12  # of the text of an exception

_BEGIN: Final = "Traceback (most recent call last):"
_FRAME: Final = re.compile(r'^\s*File "(?P<file>[^"]+)", line (?P<line>\d+)(?:, in (?P<function>.+))?$')
_NOT_THE_EXCEPTION: Final = re.compile(
    r"^(\[[A-Z]\d{4} |lockstep: |Exception ignored|terminate called|in the loader process)"
)
_OURS: Final = str(Path(__file__).parents[1])
_STANDARD: Final = sysconfig.get_paths()["stdlib"]


@dataclass(frozen=True)
class Frame:
    file: str
    line: int
    function: str = ""
    source: str = ""


@dataclass(frozen=True)
class Trouble:
    what: str = ""  # the exception, as the last lines of a traceback have it; "": there was none
    cause: str = ""  # the exception behind it, unless that says the same
    frame: Frame | None = None


def read(words: Sequence[str]) -> Trouble:
    """The last traceback among these lines, with its causes."""
    sections, by_cause = [[]], [False]  # type: tuple[list[list[str]], list[bool]]
    for line in words:
        if line.strip() in (BY_CAUSE, MEANWHILE):
            sections.append([])
            by_cause.append(line.strip() == BY_CAUSE)
        else:
            sections[-1].append(line)
    if not any(_BEGIN in line for line in words):
        return Trouble()
    first = last = len(sections) - 1
    while first > 0 and by_cause[first]:
        first -= 1
    frames = [find_frame(section) for section in sections]
    # The deepest cause that is in the user's own code; else what came on top of it.
    frame = next((frames[n] for n in range(first, last + 1) if frames[n] is not None), None)
    if frame is None:  # nothing of the user's in what was raised last; perhaps in what it was raised over
        frame = next((one for one in reversed(frames) if one is not None), None)
    what, cause = _exception(sections[last]), _exception(sections[first]) if first != last else ""
    if frames[first] is None or cause in what:  # what broke inside of torch or of us is said in other words by then
        cause = ""
    return Trouble(what, cause, frame)


def find_frame(lines: Sequence[str]) -> Frame | None:
    """The innermost one that is neither torch's nor ours nor the standard library's."""
    found = None
    for n, line in enumerate(lines):
        match = _FRAME.match(line)
        if match is not None and is_users(match["file"]):
            after = lines[n + 1].strip() if n + 1 < len(lines) else ""
            source = "" if _FRAME.match(lines[n + 1] if after else "") else after
            found = Frame(match["file"], int(match["line"]), match["function"] or "", source)
    return found


def cut(error: TracebackException) -> int:
    """Leave only the user's own frames in it, and in what it was caused by. Returns how many others there were.

    A cause that has none is left out: what broke inside of torch or of us is said in other words by then.
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
    """Where no frame is the user's (a program that was installed as a package), those of other libraries."""
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
    """The file of each frame in it."""
    return [match["file"] for line in text.splitlines() if (match := _FRAME.match(line))]


def cut_text(text: str) -> str:
    """The same without the frames that are not the user's: for the traceback of a loader process, which is text."""
    kept, is_shown = [], True
    for line in text.splitlines(keepends=True):
        match = _FRAME.match(line.rstrip("\n"))
        if match is not None:
            is_shown = is_users(match["file"])
        elif not line.startswith("    "):  # what belongs to a frame is indented further than it
            is_shown = True
        kept += [line] if is_shown else []
    return "".join(kept)


def is_foundation(file: str) -> bool:
    """Of torch, of ours, or of Python itself."""
    package = re.search(r"/(?:site|dist)-packages/(\w+)/", file)
    if package is not None:
        return package[1] in ("torch", "lockstep")
    return file.startswith(("<frozen", _OURS + "/", _STANDARD + "/"))


def is_users(file: str) -> bool:
    if file.startswith(("<frozen", _OURS + "/", _STANDARD + "/")):
        return False
    return "/site-packages/" not in file and "/dist-packages/" not in file


def shorten(what: str) -> str:
    """Torch puts the traceback of its loader process into the text of an exception: the first line and the last do."""
    first, found, rest = what.partition("\nOriginal Traceback")
    lines = [line for line in rest.splitlines() if line and not line[0].isspace()]
    return f"{first}\n{lines[-1]}" if found and lines else what


def _exception(section: Sequence[str]) -> str:
    """Its type and text: what is not indented, after the frames."""
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
    # Python names the module of a class that is not built in. Nobody needs that of ours, or torch's.
    return re.sub(r"^(?:lockstep|torch)(?:\.\w+)+\.(?=\w+(?::|$))", "", text)
