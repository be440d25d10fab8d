"""`lockstep scale`: changes the number of workers of a run that was started with --min or --max."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from lockstep.cli.arguments import worker_count
from lockstep.launcher import scale_request


def add_parser(commands: Any) -> None:
    """`commands` is what `ArgumentParser.add_subparsers` returns."""
    parser = commands.add_parser(
        "scale", description="Change the number of workers of a run that was started with --min or --max."
    )
    parser.add_argument(
        "run", type=Path, metavar="RUN", help="its folder of logs, or the directory of its lockstep.Run"
    )
    parser.add_argument("workers", type=worker_count, metavar="N", help="how many workers it shall have")


def main(chosen: argparse.Namespace) -> int:
    try:
        scale_request.request_workers(chosen.run, chosen.workers)
    except scale_request.OutOfBounds as error:
        print(f"lockstep: {error}", file=sys.stderr)
        return 2
    except scale_request.NotRunning as error:
        print(
            f"lockstep: {chosen.run} is not a run that goes on and was started with --min or --max ({error}); give the "
            "folder of its logs, which `lockstep run` prints or takes as --log-dir",
            file=sys.stderr,
        )
        return 2
    print(f"asked for {chosen.workers} workers; its output says when it has them")
    return 0
