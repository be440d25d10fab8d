"""`lockstep ledger`: proves that a run has used every sample exactly once in every epoch."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lockstep.errors import LockstepError


def add_parser(commands: Any) -> None:
    """`commands` is what `ArgumentParser.add_subparsers` returns."""
    parser = commands.add_parser(
        "ledger", description="Prove that a run has used every sample exactly once in every epoch, whatever happened."
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="the directory of a lockstep.Run")
    parser.add_argument("--json", action="store_true", help="for programs")


def main(chosen: argparse.Namespace) -> int:
    from lockstep.data.ledger import prove

    try:
        proof = prove(chosen.run)
    except (LockstepError, OSError) as error:
        print(f"lockstep: {error}", file=sys.stderr)
        return 2
    if chosen.json:
        print(json.dumps(asdict(proof) | {"holds": proof.holds}))
        return 0 if proof.holds else 1
    for epoch in proof.epochs:
        verdict = "each sample once" if epoch.complete else "as far as it came, each once" if epoch.exact else ""
        said = epoch.problem or epoch.note or verdict
        print(f"epoch {epoch.number}: {epoch.steps} steps, {epoch.samples} samples: {said}")
    again = f", resumed {proof.restarts} times" if proof.restarts else ""
    holds = "proven" if proof.claims_each_once else "no step is missing, and none was applied twice"
    print(f"{proof.steps} steps over {proof.samples} samples{again}: {holds if proof.holds else 'DOES NOT HOLD'}")
    return 0 if proof.holds else 1
