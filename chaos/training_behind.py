"""Lets workers fall one step behind the others while another one is lost, and checks that nothing of it can be seen.

As `training.py`: a worker is stopped (SIGSTOP) when it has the gradients of a step and has not applied it; the others
apply it, run the body of their loop and come to the next step; there one of them is killed; then the first one is
continued. The programs change their state themselves around each step: a target network, the learning rate, a scheduler
that follows the loss, an average of the weights that was registered, random numbers, steps of two optimisers. The run
must end with status 0 and the bits of an undisturbed one.

    python chaos/training_behind.py                         50 rounds of each of six programs on shm and on Gloo
    python chaos/training_behind.py --quick                 one case of each program
    python chaos/training_behind.py --seed 7 --only-case 3  one case again; with --times 20, twenty times

Exit status: 0 when all of it held; 1 when not; 2 for wrong arguments.
"""

from __future__ import annotations

import sys

from training import Kind, main
from training_plan import BEHIND, BODIES, plan_behind

ROUNDS = 2 * BEHIND  # workers that are hit in a case: one is stopped, one killed
BEHINDS = Kind(
    "training_behind.py",
    __doc__,
    "hits",
    plan_behind,
    ROUNDS,
    wanted=2 * 2 * len(BODIES) * ROUNDS,
    seeds=2,
    quick_wanted=2 * len(BODIES) * ROUNDS,
    quick_seeds=1,
)

if __name__ == "__main__":
    sys.exit(main(BEHINDS, sys.argv[1:]))
