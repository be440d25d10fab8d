"""One case with real workers: form a group, kill, collect the errors, reap, form again, look for what is left."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from random import Random

import torch.distributed as dist

import leftovers
from fleet import Fleet, Member, Silent
from plan import COLLECTIVES, Case, Event
from result_check import NOTICE_S, Fault, Finding, Result, judge
from worker import Address, Formed, Join, Left, Reform, Reformed, Told

FORM_S = 30.0  # for a group to be there
LEAVE_S = 10.0  # for a group to be destroyed


class CaseStores:
    """Stores for one case: in the driver, or in files, so that no death takes them away."""

    def __init__(self, case: Case, fleet: Fleet) -> None:
        self._path = fleet.folder / f"store-{time.monotonic_ns()}" if case.store == "file" else None
        self._server = None
        if self._path is None:
            wait = timedelta(seconds=FORM_S)
            self._server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=wait)

    def address(self, name: str) -> Address:
        if self._server is not None:
            return Address(port=self._server.port)
        return Address(path=f"{self._path}-{name}")

    def has_signed(self, rank: int) -> bool:
        """Whether this worker has told at the store of the first group that it is there."""
        if self._path is not None:
            file = Path(self.address("first").path)
            return file.exists() and f"process/{rank}".encode() in file.read_bytes()
        assert self._server is not None
        keys = getattr(self._server, "list_keys", list)()  # older torch has none, and the check is milder
        return any(key.endswith(f"process/{rank}") for key in keys)

    def close(self) -> None:
        self._server = None
        if self._path is not None:
            for file in self._path.parent.glob(f"{self._path.name}*"):
                file.unlink()


def run(case: Case, fleet: Fleet, *, backend: str) -> Result:
    """Whatever happens, the fleet is fit for the next case afterwards."""
    result = Result(case)
    shm_before = leftovers.shm_files()
    members = list(fleet.get(case.workers))
    Random(f"ranks {case.seed} {case.number}").shuffle(members)  # who has survived before may have any rank now
    result.pids = {rank: member.pid for rank, member in enumerate(members)}
    stores = CaseStores(case, fleet)
    try:
        _strike(result, members, stores, fleet, backend=backend)
        result.signed = stores.has_signed(case.victims[0])
        note = fleet.note(members[case.victims[0]])
        result.place, result.inside = _place(case, note.collective), bool(note.inside)
        _listen(result, members)
        _finish_victims(result, members, fleet)
        _form_again(result, members, stores, backend)
        result.findings += judge(result)
    except Silent as silent:
        result.findings += [*judge(result), Finding(Fault.BROKEN, str(silent))]
        for member in members:
            fleet.discard(member)
    finally:
        stores.close()
    _check_leftovers(result, "on this machine", [*leftovers.shm_left(shm_before), *fleet.strangers()])
    return result


def _place(case: Case, collective: int) -> str:
    if collective >= 0:
        return COLLECTIVES[collective]
    return "new_group" if case.event is Event.NEW_GROUP else "forming"


def _strike(result: Result, members: Sequence[Member], stores: CaseStores, fleet: Fleet, *, backend: str) -> None:
    case, end_s = result.case, time.monotonic() + FORM_S
    for rank, member in enumerate(members):
        member.send(Join(case, rank, stores.address("first"), backend))
    if case.event is Event.FORMING:
        first = members[case.victims[0]]
        while not fleet.note(first).steps and not fleet.note(first).inside and time.monotonic() < end_s:
            time.sleep(0.0002)
    else:
        for member in members:
            member.receive(Formed, end_s)
    time.sleep(case.delay_s)
    for number, rank in enumerate(case.victims):
        if number == 1:
            time.sleep(case.gap_s)
        member = members[rank]
        result.strikes[rank] = member.stop() if case.event is Event.STOP else member.kill()


def _listen(result: Result, members: Sequence[Member]) -> None:
    """What the survivors were told, and how they left."""
    end_s = time.monotonic() + result.case.patience_s + LEAVE_S
    for rank in result.case.survivors:
        result.told[rank] = members[rank].receive(Told, end_s, passing_over=Formed)
    for rank in result.case.survivors:
        _check_left(result, rank, members[rank].receive(Left, end_s))


def _check_left(result: Result, rank: int, left: Left) -> None:
    if left.problem:
        result.findings.append(Finding(Fault.NO_RECOVERY, f"rank {rank} could not leave the group:\n{left.problem}"))
    if left.took_s > NOTICE_S:
        text = f"rank {rank} took {left.took_s:.1f} s to leave the group"
        result.findings.append(Finding(Fault.NO_RECOVERY, text))
    _check_leftovers(result, f"rank {rank}, after it left", left.leftovers)


def _check_leftovers(result: Result, who: str, found: Sequence[str]) -> None:
    if found:
        result.findings.append(Finding(Fault.LEFTOVERS, f"{who}: {'; '.join(found)}"))


def _finish_victims(result: Result, members: Sequence[Member], fleet: Fleet) -> None:
    case = result.case
    for rank in case.victims:
        member = members[rank]
        if not case.continued:
            if case.event is Event.STOP:
                member.kill()
            fleet.reap(member)
            continue
        # It finds itself alone: the others have left meanwhile.
        continued_s = member.go_on()
        told = member.receive(Told, continued_s + case.patience_s + LEAVE_S)
        if not told.peer_lost or told.raised_s - continued_s > NOTICE_S:
            late_s = told.raised_s - continued_s
            text = f"rank {rank} was continued, and after {late_s:.3f} s got {told.error}: {told.text}"
            result.findings.append(Finding(Fault.NOT_TOLD, text))
        _check_left(result, rank, member.receive(Left, time.monotonic() + LEAVE_S))


def _form_again(result: Result, members: Sequence[Member], stores: CaseStores, backend: str) -> None:
    survivors = [members[rank] for rank in result.case.survivors]
    for rank, member in enumerate(survivors):
        member.send(Reform(rank, len(survivors), stores.address("again"), backend))
    end_s = time.monotonic() + FORM_S
    for member in survivors:
        again = member.receive(Reformed, end_s)
        if again.problem:
            result.findings.append(Finding(Fault.NO_RECOVERY, f"the survivors' new group:\n{again.problem}"))
        _check_leftovers(result, f"pid {member.pid}, after the new group", again.leftovers)
