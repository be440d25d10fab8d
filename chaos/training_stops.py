"""Stops workers of training runs for a while (SIGSTOP, and a late SIGCONT), and checks that nothing of it can be seen.

As `training.py`, with `--stall-s 1`: a worker that gives no sign of life for a second is taken for dead, and is killed
then. So most of those that are stopped here never go on; some wake up just before, or in the middle of it. Some are
stopped in a collective, some in the optimiser, some after they have applied a step, and many of them are rank 0. The
run must end with status 0 and the bits of an undisturbed one; must have named all that were stopped for too long;
and no worker may apply a step that it has applied.

    python chaos/training_stops.py                          200 stops
    python chaos/training_stops.py --quick                  10
    python chaos/training_stops.py --seed 7 --only-case 3   one case again; with --times 20, twenty times

Exit status: 0 when all of it held; 1 when not; 2 for wrong arguments.
"""

from __future__ import annotations

import sys

from training import Kind, main
from training_plan import STOPS, plan_stops

PAUSES = Kind(
    "training_stops.py", __doc__, "stops", plan_stops, STOPS, wanted=200, seeds=10, quick_wanted=10, quick_seeds=1
)

if __name__ == "__main__":
    sys.exit(main(PAUSES, sys.argv[1:]))
