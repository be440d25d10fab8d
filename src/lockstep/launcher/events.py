"""What happened on this host: in words on the screen, and for programs in a file."""

from __future__ import annotations

import json
import re
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, final

from lockstep.launcher.hosts import HOST, in_words
from lockstep.launcher.output import say


@final
class Events:
    """events.jsonl in the folder of logs: a line for all that happened. A full disk must not end the training."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def say(self, text: str) -> None:
        say(in_words(re.sub(rf"\b{HOST}\.(\d+)", r"worker \1", text)))

    def note(self, event: str, **facts: Any) -> None:
        line = json.dumps({"time": time.time(), "monotonic": time.monotonic(), "event": event, **facts})
        with suppress(OSError), self._path.open("a") as file:
            file.write(line + "\n")
