"""Makes docs/pictures/demo.gif and the report-*.png beside it, from a real run of `lockstep demo`; and plan-*.png.

    pip install pyte                                 a terminal without a window; nothing else here needs it
    python docs/make_pictures.py                     runs the demo in a new folder /tmp/show, and draws: two minutes
    python docs/make_pictures.py --again             only draws, from what the last run has left there
    python docs/make_pictures.py --again --frames D  and puts each frame of the recording into D, to be looked at
    python docs/make_pictures.py --plan [PAGE]       only plan-*.png: of this page, or of the sample of the tests

Needs the extra `dev` (Pillow and a font come with matplotlib) and Chromium. The efficiency in the pictures is that of
this machine at this moment: run it while nothing else runs, and look at the pictures before you keep them.
"""

from __future__ import annotations

import argparse
import base64
import codecs
import fcntl
import io
import itertools
import json
import os
import pty
import shutil
import struct
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import matplotlib
import pyte
from PIL import Image, ImageDraw, ImageFont

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))
from browser import Page, browse  # noqa: E402

PICTURES = ROOT / "docs" / "pictures"
SHOW = Path("/tmp/show")  # a name that tells nothing about who made the pictures
COLUMNS, ROWS = 100, 30
PROMPT = "\x1b[32m$\x1b[0m lockstep demo\r\n"  # the recording begins after it was typed

SPEED, HURRY = 2.0, 5.0  # times as fast as it was: what is new, and what was seen before
HURRY_FROM, HURRY_TO = "2. The same", "What came out"
FRAME_S, FIRST_S, LAST_S, LONGEST_S = 0.25, 1.0, 8.0, 1.5  # as shown
MOST_BYTES = {"demo.gif": 1_500_000} | {f"report-{name}.png": 250_000 for name in ("light", "dark", "phone")}
MOST_BYTES |= {f"plan-{name}.png": 250_000 for name in ("light", "dark")}


# ---- the run ---------------------------------------------------------------------------------------------------------


def record(folder: Path) -> None:
    """Runs the demo in a terminal, and keeps what it wrote there, and when."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    env = os.environ | {"TERM": "xterm-256color", "COLORTERM": "", "PYTHONPATH": str(ROOT / "src")}
    env = {name: value for name, value in env.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")}
    command = [sys.executable, "-m", "lockstep", "demo", "--directory", "runs/demo"]
    pieces: list[tuple[float, str]] = []
    decode = codecs.getincrementaldecoder("utf-8")("replace").decode
    process = subprocess.Popen(
        command, cwd=folder, env=env, stdin=slave, stdout=slave, stderr=slave, start_new_session=True
    )
    os.close(slave)
    began_s = time.monotonic()
    while data := _read(master):
        pieces.append((time.monotonic() - began_s, decode(data)))
    os.close(master)
    if process.wait() != 0:
        sys.exit("the demo has failed:\n" + "".join(text for _, text in pieces))
    (folder / "recording.json").write_text(json.dumps(pieces))


def _read(master: int) -> bytes:
    try:
        return os.read(master, 1 << 16)
    except OSError:  # how Linux says that no process has the other end any more
        return b""


# ---- the terminal ----------------------------------------------------------------------------------------------------

DARK, LIGHT = "#11151c", "#d5dae3"
COLOURS = {
    "black": "#3b4252",
    "red": "#e06c75",
    "green": "#8fc77a",
    "brown": "#e5c07b",  # what pyte calls yellow
    "yellow": "#e5c07b",
    "blue": "#6cb0f0",
    "magenta": "#d67ad2",
    "cyan": "#4fb8c9",
    "white": LIGHT,
}
FAINT = "#7f8899"
DOTS = ("#e0605a", "#e0b04a", "#5cb85c")


class Screen(pyte.Screen):
    """pyte leaves faint text out (SGR 2). It is kept here as italics, which nothing of ours uses."""

    def select_graphic_rendition(self, *attributes: int, **named: bool) -> None:
        super().select_graphic_rendition(*(3 if one == 2 else one for one in attributes), **named)
        if 22 in attributes:  # neither bold nor faint
            self.cursor.attrs = self.cursor.attrs._replace(bold=False, italics=False)


@dataclass(frozen=True)
class Cell:
    text: str
    colour: str
    bold: bool


Shot = tuple[tuple[Cell, ...], ...]  # rows of cells


def hurry(pieces: list[tuple[float, str]]) -> Iterator[tuple[float, str]]:
    """The same, with the times at which they are shown."""
    speed, before_s, shown_s = SPEED, 0.0, 0.0
    for at_s, text in pieces:
        shown_s += (at_s - before_s) / speed
        before_s = at_s
        speed = HURRY if HURRY_FROM in text else SPEED if HURRY_TO in text else speed
        yield shown_s, text


def shots(pieces: list[tuple[float, str]]) -> Iterator[tuple[float, Shot]]:
    """(when, what the terminal shows), for each change that lasts."""
    screen = Screen(COLUMNS, ROWS)
    stream = pyte.Stream(screen)
    stream.feed(PROMPT)
    last, due_s = look(screen), FRAME_S
    yield 0.0, last
    for (at_s, text), (next_s, _) in zip(pieces, [*pieces[1:], (float("inf"), "")], strict=True):
        stream.feed(text)
        if next_s - at_s > 0.004 and next_s >= due_s:  # a picture that is half drawn goes on at once
            shot = look(screen)
            due_s = at_s + FRAME_S
            if shot != last:
                yield at_s, shot
                last = shot


def look(screen: pyte.Screen) -> Shot:
    rows = []
    for y in range(ROWS):
        row = [screen.buffer[y][x] for x in range(COLUMNS)]
        rows.append(tuple(Cell(char.data, _colour(char), char.bold) for char in row))
    return tuple(rows)


def _colour(char: pyte.screens.Char) -> str:
    if char.data == " ":
        return LIGHT
    if char.italics:
        return FAINT
    if char.fg == "default":
        return LIGHT
    return COLOURS.get(char.fg.removeprefix("bright"), f"#{char.fg}")


ARMS = {  # of box characters: how thick to the left, right, top, bottom
    "─": (1, 1, 0, 0),
    "│": (0, 0, 1, 1),
    "╭": (0, 1, 0, 1),
    "╮": (1, 0, 0, 1),
    "╰": (0, 1, 1, 0),
    "╯": (1, 0, 1, 0),
    "━": (3, 3, 0, 0),
    "╸": (3, 0, 0, 0),
    "╺": (0, 3, 0, 0),
}


class Painter:
    SIZE, PAD, BAR = 14, 14, 30

    def __init__(self) -> None:
        fonts = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
        self._plain = ImageFont.truetype(fonts / "DejaVuSansMono.ttf", self.SIZE)
        self._bold = ImageFont.truetype(fonts / "DejaVuSansMono-Bold.ttf", self.SIZE)
        self._width = self._plain.getlength("M")
        self._height = sum(self._plain.getmetrics()) + 1

    def paint(self, shot: Shot) -> Image.Image:
        size = (round(COLUMNS * self._width) + 2 * self.PAD, ROWS * self._height + 2 * self.PAD + self.BAR)
        image = Image.new("RGB", size, DARK)
        draw = ImageDraw.Draw(image)
        draw.rectangle((0, 0, size[0], self.BAR), fill="#1c222c")
        for n, colour in enumerate(DOTS):
            x, y = self.PAD + 8 + 20 * n, self.BAR // 2
            draw.ellipse((x - 5, y - 5, x + 5, y + 5), fill=colour)
        for y, row in enumerate(shot):
            for x, cell in enumerate(row):
                if cell.text.strip():
                    self._put(draw, x, y, cell)
        return image

    def _put(self, draw: ImageDraw.ImageDraw, x: int, y: int, cell: Cell) -> None:
        left, top = self.PAD + x * self._width, self.BAR + self.PAD + y * self._height
        if not self._line(draw, left, top, cell):
            draw.text((round(left), top), cell.text, fill=cell.colour, font=self._bold if cell.bold else self._plain)

    def _line(self, draw: ImageDraw.ImageDraw, left: float, top: float, cell: Cell) -> bool:
        """Box characters are drawn, not written: those of a font leave gaps between rows."""
        x0, x1 = round(left), round(left + self._width)
        y0, y1 = round(top), round(top + self._height)
        mid_x, mid_y = (x0 + x1) // 2, (y0 + y1) // 2
        arms = ARMS.get(cell.text)
        if arms is None:
            return False
        ends = ((x0, mid_y), (x1 - 1, mid_y), (mid_x, y0), (mid_x, y1 - 1))
        for arm, end in zip(arms, ends, strict=True):
            if arm:
                draw.line(((mid_x, mid_y), end), fill=cell.colour, width=arm)
        return True


def write_recording(folder: Path, path: Path, *, frames_to: Path | None) -> None:
    found = list(shots(list(hurry(json.loads((folder / "recording.json").read_text())))))
    painter = Painter()
    images = [painter.paint(shot) for _, shot in found]
    times_s = [at_s for at_s, _ in found]
    lasts = [min(after - before, LONGEST_S) for before, after in itertools.pairwise(times_s)]
    lasts = [max(FIRST_S, lasts[0]), *lasts[1:], LAST_S]
    # One palette for all, so that a frame differs from the one before only where the text does: that is what is stored.
    sample = Image.new("RGB", (images[0].width, 3 * images[0].height))
    for n, image in enumerate((images[0], images[len(images) // 3], images[-1])):
        sample.paste(image, (0, n * image.height))
    for n, colour in enumerate((*DOTS, *COLOURS.values())):  # however little there is of it
        sample.paste(colour, (40 * n, 0, 40 * n + 40, 200))
    palette = sample.quantize(48, dither=Image.Dither.NONE)
    frames = [image.quantize(palette=palette, dither=Image.Dither.NONE) for image in images]
    durations = [max(20, 10 * round(100 * last_s)) for last_s in lasts]
    options = {"duration": durations, "loop": 0, "optimize": False, "disposal": 1}
    frames[0].save(path, save_all=True, append_images=frames[1:], **options)
    print(f"{len(frames)} frames, {sum(durations) / 1000:.0f} s")
    if frames_to is not None:
        frames_to.mkdir(parents=True, exist_ok=True)
        for n, image in enumerate(images):
            image.save(frames_to / f"{n:03}.png")


# ---- the report ------------------------------------------------------------------------------------------------------


def photograph(folder: Path, pictures: Path) -> None:
    report = folder / "runs" / "demo" / "digits" / "report.html"
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile, browse(Path(profile) / "profile") as page:
        for name, dark in (("light", False), ("dark", True)):
            page.resize(1000, 900, dark=dark)
            page.open(report)
            page.ask(TWO_WORKERS)
            _shoot(page, pictures / f"report-{name}.png", width=1000, below="timeline")
        page.resize(390, 844)
        page.open(report)
        _shoot(page, pictures / "report-phone.png", width=390, below="time", scale=2)


def photograph_plan(plan_page: Path | None, pictures: Path) -> None:
    """Draws the upper part of a page of `lockstep plan`; without one, of the sample of tests/test_plan_page.py."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder, browse(Path(folder) / "profile") as page:
        if plan_page is None:
            from lockstep.plan.page import render_plan
            from test_plan_page import sample_plan

            plan_page = Path(folder) / "plan.html"
            plan_page.write_text(render_plan(sample_plan(), ""), encoding="utf-8")
        for name, dark in (("light", False), ("dark", True)):
            page.resize(1000, 900, dark=dark)
            page.open(plan_page.resolve())
            _shoot(page, pictures / f"plan-{name}.png", width=1000, below="money")


# What the page shows first may be the steps of one worker alone, in which there is no communication to be seen.
TWO_WORKERS = """(() => {
  const scene = document.getElementById("scene");
  const fit = [...scene.options].filter(option => option.text.includes("2 workers"));
  scene.value = fit[fit.length - 1].value;
  scene.dispatchEvent(new Event("change"));
})()"""


def _shoot(page: Page, path: Path, *, width: int, below: str, scale: int = 1) -> None:
    """From the top down to the end of a section. What is further down names this machine."""
    page.settle()
    height = page.ask(f"document.getElementById('{below}').getBoundingClientRect().bottom + window.scrollY + 16")
    clip = {"x": 0, "y": 0, "width": width, "height": height, "scale": scale}
    shot = page.call("Page.captureScreenshot", format="png", captureBeyondViewport=True, clip=clip)
    image = Image.open(io.BytesIO(base64.b64decode(shot["data"]))).convert("RGB")
    image.quantize(256, dither=Image.Dither.NONE).save(path, optimize=True)  # half the size, and looks the same


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--again", action="store_true", help=f"only draw, from what is in {SHOW}")
    parser.add_argument("--frames", type=Path, metavar="DIR", help="for each frame of the recording, as a picture")
    parser.add_argument("--plan", nargs="?", const="", metavar="PAGE", help="only the pictures of a plan")
    chosen = parser.parse_args()
    if not chosen.again and chosen.plan is None:
        shutil.rmtree(SHOW, ignore_errors=True)
        SHOW.mkdir()
        record(SHOW)
    if chosen.plan is None:
        write_recording(SHOW, PICTURES / "demo.gif", frames_to=chosen.frames)
        photograph(SHOW, PICTURES)
    photograph_plan(Path(chosen.plan) if chosen.plan else None, PICTURES)
    for name, most_bytes in MOST_BYTES.items():
        size_bytes = (PICTURES / name).stat().st_size
        print(f"{name}: {size_bytes / 1000:.0f} kB" + ("" if size_bytes <= most_bytes else ", which is too much"))


if __name__ == "__main__":
    main()
