"""Who is dead, as far as it can be known, and who is never taken for dead."""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
from torch.distributed import HashStore

from lockstep.errors import PeerLostError, WorldError
from lockstep.process_identity import ProcessIdentity, read_stat, this_process
from lockstep.world.rendezvous import JoinLiveness, JoinRegistry, Rendezvous

NEW_PIDS = 0x20000000  # CLONE_NEWPID
TELL = "import json; from lockstep.process_identity import this_process; print(json.dumps(vars(this_process())))"


def process_of(pid: int) -> ProcessIdentity:
    return ProcessIdentity(pid, read_stat(pid).started, this_process().space)


@contextmanager
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "60"]) as child:
        try:
            yield child
        finally:
            child.kill()


def until_dead(process: ProcessIdentity, within_s: float = 5) -> None:
    end_s = time.monotonic() + within_s
    while not process.is_dead(seen_from=this_process()):
        assert time.monotonic() < end_s, "not seen to be dead"
        time.sleep(0.005)


# ------------------------------------------------------------------------------------------------------- one process


def test_a_process_is_dead_from_its_end_on_collected_or_not() -> None:
    with sleeper() as child:
        process = process_of(child.pid)
        assert not process.is_dead(seen_from=this_process())
        child.kill()
        until_dead(process)  # a zombie
        child.wait()
        assert process.is_dead(seen_from=this_process())


def test_a_process_that_got_the_number_of_a_dead_one_is_another() -> None:
    me = this_process()
    assert not me.is_dead(seen_from=me)
    assert replace(me, started=str(int(me.started) - 1)).is_dead(seen_from=me)
    assert not replace(me, started="").is_dead(seen_from=me)  # it did not know when it was started


def test_a_process_of_another_host_or_namespace_is_never_taken_for_dead() -> None:
    me = this_process()
    with sleeper() as child:
        process = process_of(child.pid)
    assert process.is_dead(seen_from=me)
    assert not replace(process, space="elsewhere").is_dead(seen_from=me)
    assert not replace(process, space="").is_dead(seen_from=replace(me, space=""))


def test_hosts_that_were_given_names_are_different_spaces(monkeypatch: pytest.MonkeyPatch) -> None:
    here = this_process()
    monkeypatch.setenv("LOCKSTEP_HOST", "another")
    assert this_process().space != here.space


def in_a_new_pid_namespace(command: list[str]) -> str:
    def enter() -> None:
        if ctypes.CDLL(None).unshare(NEW_PIDS):
            raise PermissionError

    try:
        # The command is the child of a process that has left our pid namespace: so it is outside too.
        script = f"import subprocess, sys; sys.exit(subprocess.run({command!r}).returncode)"
        done = subprocess.run([sys.executable, "-c", script], preexec_fn=enter, capture_output=True, text=True)
    except subprocess.SubprocessError:
        pytest.skip("needs root, to make a pid namespace")
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_in_a_namespace_whose_proc_is_not_its_own_no_process_can_be_known() -> None:
    told = ProcessIdentity(**json.loads(in_a_new_pid_namespace([sys.executable, "-c", TELL])))
    assert told.pid < 10, "not in a pid namespace of its own"
    assert told.space == ""
    assert not told.is_dead(seen_from=this_process())


def test_a_container_is_a_space_of_its_own() -> None:
    unshare = ["unshare", "--pid", "--fork", "--mount-proc", sys.executable, "-c", TELL]
    done = subprocess.run(unshare, capture_output=True, text=True)
    if done.returncode:
        pytest.skip("needs root, to make a pid namespace")
    told = ProcessIdentity(**json.loads(done.stdout))
    assert told.pid == 1
    assert told.space not in ("", this_process().space)
    assert not replace(told, pid=2**22).is_dead(seen_from=this_process())  # no such process here


# ---------------------------------------------------------------------------------------------------- several of them


def test_all_who_look_blame_the_same_one() -> None:
    store: Any = HashStore()
    with sleeper() as one, sleeper() as two:
        first, second = process_of(one.pid), process_of(two.pid)
    for order in ((1, 2), (2, 1)):
        liveness = JoinLiveness(store, during="they formed a group")
        for rank in order:
            liveness.watch(rank, first if rank == 1 else second)
        with pytest.raises(PeerLostError, match=rf"rank 1 \(pid {first.pid}\) died while they formed a group") as lost:
            liveness.check()
        assert (lost.value.rank, lost.value.pid) == (1, first.pid)


def test_who_has_signed_the_roll_can_be_seen_to_die_by_all_the_others() -> None:
    store: Any = HashStore()
    with sleeper() as child:
        store.set("process/1", json.dumps(vars(process_of(child.pid))))
        registry = JoinRegistry(store, 0, [4, 7, 9])
        registry.check()
        assert (1 in registry.joined, 2 in registry.joined) == (True, False)
    time.sleep(0.06)  # it does not look more often
    with pytest.raises(PeerLostError, match="rank 7") as lost:
        registry.check()
    assert lost.value.rank == 7


def test_who_is_known_from_elsewhere_need_not_have_signed() -> None:
    with sleeper() as child:
        known = {7: process_of(child.pid), 8: replace(this_process(), started="1")}  # 8 is dead, and not a member
        registry = JoinRegistry(HashStore(), 0, [4, 7, 9], known)
        registry.check()
        assert 1 not in registry.joined
    time.sleep(0.06)
    with pytest.raises(PeerLostError, match="rank 7"):
        registry.check()


def test_a_meeting_names_who_died_after_its_card_and_not_who_is_merely_late() -> None:
    store: Any = HashStore()
    with sleeper() as child:
        store.set("card/1", json.dumps({"process": vars(process_of(child.pid))}))
        rendezvous = Rendezvous(store, 0, 2, "host:1", time.monotonic() + 0.2)
        assert rendezvous.exchange_identities({}) == [{}, {}]
        with pytest.raises(WorldError, match="rank 0 of 2 waited at host:1 for rank 1"):
            rendezvous.exchange("gpu", "")
    with pytest.raises(PeerLostError, match=rf"rank 1 \(pid {child.pid}\) died while 2 workers met at host:1"):
        rendezvous.exchange("gpu", "")
