"""The workers of one host in an elastic run: the messages that they send, and the orders that they get.

It carries out `membership`: keeps this host's record, proposes the next generation, and sends the orders. The loss of a
worker is handled in `host_agent`; what the other workers do then is in recovery/elastic_calls.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final, final

from lockstep.elastic.agent_client import JsonPipe, Message
from lockstep.elastic.membership import (
    START,
    Generation,
    OrderAction,
    Position,
    Standing,
    Want,
    Worker,
    next_generation,
    orders,
)
from lockstep.elastic.record_json import as_json
from lockstep.elastic.records import CallLog, GenerationStore, Records
from lockstep.elastic.worker_state import LocalWorker, RestartRequest
from lockstep.launcher.hosts import Events

LEASE_EVERY_S: Final = 0.5  # how often workers are sent the time until which the lease of this host holds

# How long after a worker has quit the others may still quit too: while they are in a call, and on other hosts.
QUIT_WITHIN_S: Final = 5.0
QUIT_ELSEWHERE_WITHIN_S: Final = 10.0


@final
class HostWorkers:
    """See membership.py, Note [Rules for host agents]."""

    def __init__(self, records: Records, events: Events) -> None:
        self._records, self._events = records, events
        self._call_log, self._generation_store = CallLog(records), GenerationStore(records.client, records.keys.values)
        self.workers: dict[str, LocalWorker] = {}
        self.is_elastic = False  # the program has a Run, so it can continue without one of its workers
        self.newest: Position = START  # the furthest position that the run is known to have reached
        self.current: Position = START  # where the run is now: further back after all workers were lost
        self.limit: int | None = None  # how many workers the run can use at most, once a worker has sent it
        self.on_compile: Callable[[], None] = lambda: None  # called when a worker will use torch.compile
        self.progress_count = 0  # how often a worker of this host has sent a new position
        self._next_serial = 0
        self._lease_sent_s = 0.0
        self._seen_generation = Generation(0)

    # -- processes ---------------------------------------------------------------------------------------------------

    def add(self, pipe: JsonPipe, slot: int) -> LocalWorker:
        """Register a process that has been started. `pipe` is this host's end."""
        worker = Worker(f"{self._records.name}.{self._next_serial}", Standing.STARTING)
        self._next_serial += 1
        self.workers[worker.id] = local = LocalWorker(worker, pipe, slot)
        return local

    def remove(self, id_: str, *, done: bool) -> bool:
        """Remove a worker whose process was reaped. `done` says that it ended by itself, with status 0.

        Returns whether it is lost although its status was 0: it was a member, and its Run was not over. A worker that
        has left its Run by an exception, or by sys.exit, is kept until `resolve_quits` decides.
        """
        local = self.workers.get(id_)
        if local is None:
            return False  # `remove_all` has removed it
        local.pipe.ended = True
        if local.record.standing is Standing.DONE:
            return False
        is_early = done and not local.released and id_ in self._records.generation.members
        if is_early and local.left_run:
            local.ended_s, local.leave_sent_s = time.monotonic(), None
            local.record = replace(local.record, standing=Standing.QUIT)
            return False
        del self.workers[id_]
        return is_early

    @property
    def has_quits(self) -> bool:
        """Whether there are workers for which `resolve_quits` has yet to decide whether they are lost."""
        return any(local.record.standing is Standing.QUIT for local in self.workers.values())

    def resolve_quits(self, now_s: float) -> list[LocalWorker]:
        """Decide about workers that have left their Run by an exception and ended with status 0.

        If all members do that, the program has ended. Returns those that are lost, because another member continues.
        """
        quits = [local for local in self.workers.values() if local.record.standing is Standing.QUIT]
        if not quits:
            return []
        known = {worker.id: worker.standing for worker in self._all_records()}
        members = {member: known.get(member) for member in self._records.generation.members}
        if all(standing in (Standing.QUIT, Standing.DONE) for standing in members.values()):
            for local in quits:
                self._mark_done(local)
            self._records.publish_over(0)
            return []
        lost = [local for local in quits if self._is_lost(local, members, now_s)]
        for local in lost:
            del self.workers[local.id]
        return lost

    def _is_lost(self, local: LocalWorker, members: Mapping[str, Standing | None], now_s: float) -> bool:
        """Whether a member continues without this worker, which has quit. A member outside of calls may yet quit."""
        if local.id not in members or None in members.values():  # another member was lost, and the others continue
            return True
        staying = [id_ for id_, standing in members.items() if standing not in (Standing.QUIT, Standing.DONE)]
        here = [self.workers[id_] for id_ in staying if id_ in self.workers]
        since_s, quit_at = now_s - local.ended_s, _position(local.position)
        for one in (one for one in here if one.is_calling and not one.left_run):
            at = _position(one.position)
            # In the same call, for example in the loss function, the others may be a little slower.
            if at > quit_at or (at == quit_at and not local.is_calling) or since_s > QUIT_WITHIN_S:
                return True
        return len(here) < len(staying) and since_s > QUIT_ELSEWHERE_WITHIN_S

    def _mark_done(self, local: LocalWorker) -> None:
        """Its Run is over: how it ends from now on does not concern the others."""
        local.leave_sent_s = None
        local.record = replace(local.record, standing=Standing.DONE)

    def remove_all(self) -> None:
        """Remove all workers: the lease of this host has ended, so the others may have continued without them."""
        self.workers.clear()
        self._records.unlist()
        self._seen_generation = Generation(0)

    def release(self, local: LocalWorker, why: str) -> None:
        """End a surplus worker. If another host makes it a member meanwhile, it counts as lost there."""
        local.released = True
        local.orders_sent.add((OrderAction.RELEASE, self._records.generation.number))
        self._send_order(local, OrderAction.RELEASE, why)

    def let_leave(self, local: LocalWorker) -> None:
        """Let a worker leave the run between two steps. One that is no member yet is released at once."""
        if (
            local.record.standing in (Standing.STARTING, Standing.READY)
            and local.id not in self._records.generation.members
        ):
            self.release(local, "it was asked to leave")
        local.record = replace(local.record, is_leaving=True)

    def stop(self, local: LocalWorker) -> None:
        """Let a worker that was sent a signal ask all others to save and to end."""
        local.signalled_s = None
        local.pipe.send({"do": "stop"})

    @property
    def is_over(self) -> bool:
        """The program has ended for a member: no worker is started any more."""
        done = any(one.standing is Standing.DONE for one in self._all_records())
        return self._records.is_clean and (done or self._records.over is not None)

    @property
    def is_finished(self) -> bool:
        """All members are done, on this host and on the others."""
        rest = [one.id for one in self._all_records() if one.standing is not Standing.DONE]
        return self.is_over and not any(member in rest for member in self._records.generation.members)

    def _all_records(self) -> list[Worker]:
        """The workers of all hosts: of this host as they are here, of the others as they are in the store."""
        elsewhere = [one for host in self._records.hosts if host.name != self._records.name for one in host.workers]
        return [*(local.record for local in self.workers.values()), *elsewhere]

    def most(self, most: int) -> int:
        """The largest number of workers that may be requested: a run may have fewer shards than `--max`."""
        return min(most, self.limit or most)

    @property
    def want(self) -> Want:
        """How many workers are wanted, limited to what the run can use."""
        want, limit = self._records.want, self.limit
        if limit is None or want.workers <= limit:
            return want
        return Want(limit, min(want.least, limit), min(want.most, limit))

    # -- messages of workers -----------------------------------------------------------------------------------------

    def handle(self, local: LocalWorker, message: Message) -> None:
        local.last_heard_s = time.monotonic()
        match message["say"]:
            case "hello":
                local.has_run, self.is_elastic, local.pid = True, True, int(message["pid"])
                self._call_log.send_welcome(local)
            case "beat":
                self._record_progress(message["position"])
                if message["position"] != local.position:
                    local.position, self.progress_count = message["position"], self.progress_count + 1
                local.is_calling = bool(message.get("calling", False))
            case "signal":
                local.signalled_s = local.signalled_s or time.monotonic()
            case "slow":
                local.slowness = float(message["times"])
            case "restart":
                local.restart = RestartRequest(str(message["why"]), is_wrong=message["is_wrong"])
            case "leaves":
                local.left_run, local.position, local.is_calling = True, message["position"], bool(message["calling"])
            case "ready":
                position = _position(message["position"])
                local.record = replace(
                    local.record, standing=Standing.READY, generation=int(message["told"]), position=position
                )
            case "inside":
                local.leave_sent_s = None
                local.record = replace(local.record, standing=Standing.INSIDE, generation=int(message["generation"]))
            case "left":
                local.leave_sent_s = None
                position = _position(message["position"])
                local.record = replace(
                    local.record, standing=Standing.LEFT, generation=int(message["generation"]), position=position
                )
                self._record_progress(position)
            case "call_log":
                self._call_log.publish(local.record, int(message["first"]), message["entries"])
            case "training":
                self.limit = max(1, int(message["workers"]))
                if message["compiles"]:
                    self.on_compile()
            case "loop":
                self._call_log.enter_loop()
            case "done":
                self._mark_done(local)
            case "recovered":
                facts = {"generation": local.record.generation, "took_s": float(message["took_s"])}
                self._events.record("recovered", worker=local.id, **facts)
            case "kv":
                self._generation_store.submit(local, message)

    def _record_progress(self, position: Any) -> None:
        self.current = max(self.current, _position(position))
        self.newest = max(self.newest, self.current)

    # -- orders to workers -------------------------------------------------------------------------------------------

    def act(self, now_s: float) -> list[tuple[LocalWorker, str]]:
        """Do what is due. Returns the workers that must be killed, and why."""
        records, client = self._records, self._records.client
        client.tick(now_s)
        self._send_lease(now_s)
        for _ in range(8):  # each change may require another
            before = client.revision
            records.clean_up()
            if records.is_clean:
                # What a worker sent before it left must be in the store before the others read that it has left.
                records.flush_pending()
                records.list_workers(local.record for local in self.workers.values())
            self._generation_store.answer_all(self.workers, records.generation.number)
            if records.is_listed:
                self._propose()
            client.tick(now_s)
            if client.revision == before:
                break
        kills = self._call_log.send_updates(self.workers.values())
        return kills if records.found is None else kills + self._send_orders(records.found)

    def _send_lease(self, now_s: float) -> None:
        if now_s - self._lease_sent_s >= LEASE_EVERY_S:
            self._lease_sent_s = now_s
            for local in self.workers.values():
                if local.has_run:
                    local.pipe.send({"do": "lease", "until_s": self._records.client.held_until_s})

    def _propose(self) -> None:
        now, hosts, want = self._records.generation, self._records.hosts, self.want
        if now.number != self._seen_generation.number:
            self._start_generation(now)
        over = self._records.over is not None  # newcomers are too late, even if the workers that were done have ended
        late = set() if over else {worker.id for worker in self._call_log.stragglers(now, hosts)}
        hosts = [
            replace(host, workers=tuple(w for w in host.workers if w.id in now.members or not (over or w.id in late)))
            for host in hosts
        ]
        want = replace(want, least=1) if over else want
        following = next_generation(now, hosts, want)
        if following is not None:
            self._records.propose(following)

    def _start_generation(self, now: Generation) -> None:
        before, self._seen_generation = self._seen_generation, now
        self.current = now.position or START
        if now.anew != before.anew:
            self._call_log.carry_over(before, now, self.workers.values())
        self._records.drop_older(self._records.keys.values, now.number)
        self._events.record("generation", number=now.number, members=now.members, position=now.position, why=now.why)
        if now.number > max(1, self._records.found or 0):
            where = "" if now.position is None or now.position[0] < 0 else f" at step {now.position[0]}"
            size = len(now.members)
            continues = f"{size} workers continue" if size > 1 else "1 worker continues"
            self._events.print(f"{now.why}; {continues}{where} (generation {now.number})")

    def _send_orders(self, found: int) -> list[tuple[LocalWorker, str]]:
        now, hosts, workers = self._records.generation, self._records.hosts, self.workers
        late = [workers[worker.id] for worker in self._call_log.stragglers(now, hosts) if worker.id in workers]
        kills = [(local, "it waits before the loop, and the others are in it") for local in late]
        for order in orders(now, hosts, self._records.name, found):
            local = workers.get(order.worker)
            if local is None:
                continue
            if order.do is OrderAction.KILL:
                kills.append((local, order.why))
            elif order.do is OrderAction.LEAVE and (OrderAction.JOIN, order.generation) not in local.orders_sent:
                # The generation broke before the JOIN was sent: the worker was never inside, and waits for another.
                local.record = replace(local.record, standing=Standing.LEFT, generation=order.generation)
            elif (order.do, order.generation) not in local.orders_sent:
                local.orders_sent.add((order.do, order.generation))
                self._send_order(local, order.do, order.why)
        return kills

    def _send_order(self, local: LocalWorker, do: OrderAction, why: str) -> None:
        now = self._records.generation
        message: Message = {"do": do.value, "generation": now.number, "why": why}
        if do is OrderAction.JOIN:
            local.pipe.send({"do": "lease", "until_s": self._records.client.held_until_s})
            message |= {"generation": as_json(now), "worker": local.id}
        if do is OrderAction.CLOSE:
            message["shrinks"] = now.shrinks
        if do is OrderAction.LEAVE:
            local.leave_sent_s = time.monotonic()
        local.pipe.send(message)


def _position(value: Any) -> Position:
    top, calls = value
    return int(top), int(calls)
