"""A batch script for SLURM.

Note [Saved and started again]
SLURM tells the batch script, with SIGUSR1, some time before the limit. The script passes it on to srun, and srun to the
tasks: the program saves after its step and ends with status 75. Then, and only then, the script puts the job back into
the queue, and the next start goes on from there. A job that is cancelled (SIGTERM) saves, too, and stays away. One that
is preempted is queued again by SLURM itself.

srun must not end the other tasks when one ends with a status that is not 0 (--kill-on-bad-exit): that of a program that
has saved is 75 on all of them, and a killed task would hide it. A worker whose peer fails finds that out itself.
"""

from __future__ import annotations

import shlex

from lockstep.launcher.job import PREEMPTED
from lockstep.submit.job import Order

_HEAD = """\
#!/bin/bash
#SBATCH --job-name={name}
#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node={tasks}
#SBATCH --cpus-per-task={cpus}
{more}#SBATCH --chdir={folder}
#SBATCH --output={name}-%j.out
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=B:USR1@{save_s}

# Written by `lockstep submit --slurm`. {about}
# Before the time is up the run saves and ends with status {preempted}; then the job is queued again, and goes on.
"""

_ELASTIC = """
# The supervisors of the nodes meet at the first node, and know each other by a secret that only this job has.
secret="$PWD/.lockstep-secret-$SLURM_JOB_ID"
rm -f "$secret"
(umask 077; {python} -c 'import secrets; print(secrets.token_hex(32))' > "$secret") || exit 1
trap 'rm -f "$secret"' EXIT
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
meet="$first:$((20000 + SLURM_JOB_ID % 10000))"
"""

_TAIL = """
asked='' heard=''
pass_on() {{ heard=1; kill -"$1" "$step" 2> /dev/null; }}
trap 'asked=1; pass_on USR1' USR1
trap 'pass_on TERM' TERM

{command} &
step=$!
while :; do
    heard=''
    wait "$step"
    status=$?
    [ -n "$heard" ] || break  # a signal ends `wait` early, and the step goes on
done

if [ "$status" -eq {preempted} ] && [ -n "$asked" ]; then
    echo "saved; the job is queued again, and goes on from there"
    scontrol requeue "$SLURM_JOB_ID"
elif [ "$status" -eq {preempted} ]; then
    echo "saved; \\`sbatch\\` it again to go on"
fi
exit "$status"
"""


def write_batch(order: Order) -> str:
    """A task per worker; with --min or --max a supervisor per node, which replaces lost workers."""
    tasks, cpus = (order.workers, order.cpus) if order.elastic is None else (1, order.workers * order.cpus)
    more = [f"--gpus-per-node={order.gpus}"] if order.gpus else []
    more += [] if order.limit_s is None else [f"--time={_clock(order.limit_s)}"]
    more += [] if order.partition is None else [f"--partition={shlex.quote(order.partition)}"]
    more += [] if order.elastic is None else ["--no-kill"]  # a lost node is no reason to end
    head = _HEAD.format(
        name=order.name,
        nodes=order.nodes,
        tasks=tasks,
        cpus=cpus,
        more="".join(f"#SBATCH {option}\n" for option in more),
        folder=shlex.quote(order.folder),
        save_s=order.save_s,
        about="srun starts every worker." if order.elastic is None else "srun starts a supervisor on every node.",
        preempted=PREEMPTED,
    )
    srun = ["srun", "--kill-on-bad-exit=0", f"--cpus-per-task={cpus}"]
    if order.elastic is None:
        head += f'\nexport OMP_NUM_THREADS="${{OMP_NUM_THREADS:-{order.cpus}}}" PYTHONUNBUFFERED=1\n'
        command = shlex.join([*srun, order.python, *order.program])
    else:
        launcher = shlex.join([*srun, "--no-kill", order.python, "-m", "lockstep", "run", *order.run_options])
        launcher += ' --log-dir "lockstep-logs/$SLURM_JOB_ID"'
        if order.nodes > 1:
            head += _ELASTIC.format(python=shlex.quote(order.python))
            launcher += f' --hosts {order.nodes} --rendezvous "$meet" --secret-file "$secret"'
        command = f"{launcher} {shlex.join(order.program)}"
    return head + _TAIL.format(command=command, preempted=PREEMPTED)


def _clock(seconds: int) -> str:
    """SLURM counts minutes; what is left over gets one more."""
    minutes = -(-seconds // 60)
    return f"{minutes // 1440}-{minutes // 60 % 24:02}:{minutes % 60:02}:00"
