"""Events of an elastic run on this host: messages on the terminal, and events.jsonl for programs."""

from __future__ import annotations

import json
import re
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, final

from lockstep.launcher.hosts import HOST, name_workers
from lockstep.launcher.output import print_message


@final
class Events:
    """Writes events.jsonl in the folder of logs, one line per event. A full disk does not end the training."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def print(self, text: str) -> None:
        print_message(name_workers(re.sub(rf"\b{HOST}\.(\d+)", r"worker \1", text)))

    def record(self, event: str, **facts: Any) -> None:
        line = json.dumps({"time": time.time(), "monotonic": time.monotonic(), "event": event, **facts})
        with suppress(OSError), self._path.open("a") as file:
            file.write(line + "\n")
