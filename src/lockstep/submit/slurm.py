"""Writes a batch script for SLURM.

Note [Save and requeue]
SLURM sends SIGUSR1 to the batch script some time before the limit. The script passes it on to srun, and srun to the
tasks: the program saves after its step and ends with status 75. Only then the script requeues the job, and the next
start resumes from the checkpoint. A job that is cancelled (SIGTERM) saves, too, and is not requeued. A preempted job is
requeued by SLURM itself.

srun must not end the other tasks when one ends with a status that is not 0 (--kill-on-bad-exit): after a save all tasks
end with status 75, and a killed task would hide that. A worker whose peer fails notices that itself.
"""

from __future__ import annotations

import shlex

from lockstep.launcher.exit_policy import PREEMPTED
from lockstep.submit.job import ClusterJob

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


def write_batch(job: ClusterJob) -> str:
    """Returns the script. It starts a task per worker; with --min or --max a supervisor per node, which replaces lost
    workers."""
    tasks, cpus = (job.workers, job.cpus) if job.elastic is None else (1, job.workers * job.cpus)
    more = [f"--gpus-per-node={job.gpus}"] if job.gpus else []
    more += [] if job.limit_s is None else [f"--time={_clock(job.limit_s)}"]
    more += [] if job.partition is None else [f"--partition={shlex.quote(job.partition)}"]
    more += [] if job.elastic is None else ["--no-kill"]  # the run continues without a lost node
    head = _HEAD.format(
        name=job.name,
        nodes=job.nodes,
        tasks=tasks,
        cpus=cpus,
        more="".join(f"#SBATCH {option}\n" for option in more),
        folder=shlex.quote(job.folder),
        save_s=job.save_s,
        about="srun starts every worker." if job.elastic is None else "srun starts a supervisor on every node.",
        preempted=PREEMPTED,
    )
    srun = ["srun", "--kill-on-bad-exit=0", f"--cpus-per-task={cpus}"]
    if job.elastic is None:
        head += f'\nexport OMP_NUM_THREADS="${{OMP_NUM_THREADS:-{job.cpus}}}" PYTHONUNBUFFERED=1\n'
        command = shlex.join([*srun, job.python, *job.program])
    else:
        launcher = shlex.join([*srun, "--no-kill", job.python, "-m", "lockstep", "run", *job.run_options])
        launcher += ' --log-dir "lockstep-logs/$SLURM_JOB_ID"'
        if job.nodes > 1:
            head += _ELASTIC.format(python=shlex.quote(job.python))
            launcher += f' --hosts {job.nodes} --rendezvous "$meet" --secret-file "$secret"'
        command = f"{launcher} {shlex.join(job.program)}"
    return head + _TAIL.format(command=command, preempted=PREEMPTED)


def _clock(seconds: int) -> str:
    """Formats a duration for --time, rounded up to minutes, which is what SLURM counts in."""
    minutes = -(-seconds // 60)
    return f"{minutes // 1440}-{minutes // 60 % 24:02}:{minutes % 60:02}:00"
