"""Asks workers of training runs to leave (SIGTERM), as a scheduler does, and checks that nothing of it can be seen.

As `training.py`, but no worker is killed: each finishes its step and leaves, the others continue, and another one takes
its place. The run must end with status 0 and the bits of an undisturbed one, use every sample exactly once, compute no
step again, and lose no worker.

    python chaos/training_drains.py                          100 drains
    python chaos/training_drains.py --quick                  20
    python chaos/training_drains.py --seed 7 --only-case 3   one case again; with --times 20, twenty times

Exit status: 0 when all of it held; 1 when not; 2 for wrong arguments.
"""

from __future__ import annotations

import sys

from training import Kind, main
from training_plan import DRAINS, plan_drains

KIND = Kind(
    "training_drains.py", __doc__, "drains", plan_drains, DRAINS, wanted=100, seeds=5, quick_wanted=20, quick_seeds=1
)

if __name__ == "__main__":
    sys.exit(main(KIND, sys.argv[1:]))
