"""Clients of a control store over real sockets: mirrors, leases, lost connections, restarts, stores that lie."""

from __future__ import annotations

import math
import random
import selectors
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from lockstep.control import server as module
from lockstep.control.connection import Dial, ProgressTimeout, TcpDial, backoff
from lockstep.control.remote_store import RemoteStoreClient, connect_store
from lockstep.control.server import LARGEST_BUFFER_BYTES, PUSH_BELOW_BYTES, Server
from lockstep.control.store import ClientOptions, ControlError, ControlStore, LocalStoreClient, StoreClient, StoreEntry
from lockstep.control.wire import LARGEST_FRAME_BYTES, Channel, new_secret

SECRET = new_secret()
OPTIONS = ClientOptions("job/", ttl_s=5.0, answer_timeout_s=2.0)


class Loop:
    """What a host agent does, as often as it takes."""

    def __init__(self) -> None:
        self.selector = selectors.DefaultSelector()
        self.parts: list[Any] = []
        self.lost: list[str] = []
        self.next_s = -math.inf

    def add(self, part: Any) -> Any:
        self.parts.append(part)
        return part

    def client(self, dial: Dial, options: ClientOptions = OPTIONS, secret: bytes = SECRET) -> RemoteStoreClient:
        client: RemoteStoreClient = self.add(
            RemoteStoreClient(dial, secret, self.selector, options=options, on_lost=self.lost.append)
        )
        return client

    def server(self, store: ControlStore, port: int = 0) -> Server:
        server: Server = self.add(Server(store, SECRET, self.selector, host="127.0.0.1", port=port))
        return server

    def turn(self, wait_s: float = 0.02) -> None:
        for key, mask in self.selector.select(max(0.0, min(wait_s, self.next_s - time.monotonic()))):
            key.data.ready(mask)
        now_s = time.monotonic()
        self.next_s = min([part.tick(now_s) for part in self.parts], default=math.inf)

    def until(self, condition: Callable[[], object], what: str, within_s: float = 5.0) -> None:
        end_s = time.monotonic() + within_s
        while not condition():
            assert time.monotonic() < end_s, f"not within {within_s} s: {what}"
            self.turn()

    def spin(self, for_s: float) -> None:
        end_s = time.monotonic() + for_s
        while (left_s := end_s - time.monotonic()) > 0:
            self.turn(min(0.02, left_s))

    def connected(self, *clients: StoreClient, within_s: float = 5.0) -> None:
        self.until(lambda: all(client.is_connected for client in clients), "connected", within_s)

    def cas(self, client: StoreClient, key: str, value: Any, revision: int, *, leased: bool = False) -> Any:
        heard: list[Any] = []
        client.cas(key, value, revision, leased=leased, then=heard.append)
        self.until(lambda: heard, f"an answer to cas {key}", 10.0)
        return heard[0]

    def delete(self, client: StoreClient, key: str, revision: int) -> Any:
        heard: list[Any] = []
        client.delete(key, revision, then=heard.append)
        self.until(lambda: heard, f"an answer to delete {key}", 10.0)
        return heard[0]

    def close(self) -> None:
        for part in reversed(self.parts):
            part.close()
        self.selector.close()


@pytest.fixture
def loop() -> Iterator[Loop]:
    made = Loop()
    yield made
    made.close()


def dial(server: Server) -> Dial:
    return TcpDial(*server.address)


@contextmanager
def deaf_listener() -> Iterator[tuple[str, int]]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()


# ----------------------------------------------------------------------------------------------------------- the mirror


def test_a_client_sees_what_was_there_and_what_others_change(loop: Loop) -> None:
    store = ControlStore()
    local: LocalStoreClient = loop.add(LocalStoreClient(store, options=OPTIONS, on_lost=loop.lost.append))
    store.cas("job/early", {"n": 1}, 0)
    store.cas("elsewhere", 1, 0)
    server = loop.server(store)
    one, two = loop.client(dial(server)), loop.client(dial(server))
    assert not one.is_connected
    assert "yet" in one.disconnect_reason
    loop.connected(one, two)
    assert one.snapshot() == store.list("job/")
    assert one.disconnect_reason == ""
    made = loop.cas(one, "job/a", [1, 2], 0)
    loop.cas(local, "job/b", None, 0)
    loop.until(lambda: len(two.snapshot()) == 3, "two sees three keys")
    assert two.snapshot() == one.snapshot() == local.snapshot() == store.list("job/")
    assert loop.delete(two, "job/a", made.revision) is True
    loop.until(lambda: "job/a" not in one.snapshot(), "one sees the deletion")


def test_an_answer_comes_when_the_snapshot_shows_it(loop: Loop) -> None:
    store = ControlStore()
    server = loop.server(store)
    one, two = loop.client(dial(server)), loop.client(dial(server))
    loop.connected(one, two)
    seen: list[Any] = []
    one.cas("job/a", 1, 0, then=lambda entry: seen.append((entry, one.snapshot()["job/a"])))
    two.cas("job/a", 2, 0, then=lambda entry: seen.append((entry, two.snapshot()["job/a"])))
    loop.until(lambda: len(seen) == 2, "both have heard")
    won = store.get("job/a")
    assert sorted(seen, key=lambda pair: pair[0] is None) == [(won, won), (None, won)]
    one.delete("job/a", one.snapshot()["job/a"].revision, then=lambda done: seen.append((done, dict(one.snapshot()))))
    two.delete("job/a", 1, then=lambda done: seen.append((done, None)))
    loop.until(lambda: len(seen) == 4, "both have heard")
    assert sorted(seen[2:], key=lambda pair: not pair[0]) == [(True, {}), (False, None)]


def test_swaps_of_many_clients_are_lost_by_none(loop: Loop) -> None:
    store = ControlStore()
    server = loop.server(store)
    clients = [loop.client(dial(server)) for _ in range(8)]
    loop.connected(*clients)
    loop.cas(clients[0], "job/count", 0, 0)
    left = {client: 20 for client in clients}

    def count(client: RemoteStoreClient) -> None:
        entry = client.snapshot().get("job/count")
        revision, value = (0, 0) if entry is None else (entry.revision, entry.value)

        def then(result: StoreEntry | ControlError | None) -> None:
            assert not isinstance(result, ControlError)
            left[client] -= result is not None
            if left[client]:
                count(client)

        client.cas("job/count", value + 1, revision, then=then)

    for client in clients:
        count(client)
    loop.until(lambda: not any(left.values()), "all have counted to twenty", 20.0)
    entry = store.get("job/count")
    assert entry is not None
    assert entry.value == 8 * 20


def test_a_snapshot_is_of_one_revision_however_large(loop: Loop) -> None:
    """Two keys that are always written one after the other are never seen the other way round."""
    store = ControlStore()
    server = loop.server(store)
    for number in range(40):
        store.cas(f"job/large/{number}", "x" * 100_000, 0)
    first, second = store.cas("job/1", 0, 0), store.cas("job/2", 0, 0)
    client = loop.client(dial(server))
    for number in range(1, 60):
        assert first is not None
        assert second is not None
        first = store.cas("job/1", number, first.revision)
        second = store.cas("job/2", number, second.revision)
        large = store.get(f"job/large/{number % 40}")
        assert large is not None
        store.cas(f"job/large/{number % 40}", "y" * 100_000, large.revision)
        loop.turn(0.002)
        seen = client.snapshot()
        if seen:
            assert len(seen) == 42
            assert seen["job/1"].value == seen["job/2"].value
    loop.until(lambda: client.snapshot() == store.list("job/"), "the client has caught up")


@pytest.mark.slow
def test_a_reader_that_stops_costs_little_and_catches_up(loop: Loop) -> None:
    store = ControlStore()
    server = loop.server(store)
    brisk, apart = loop.client(dial(server)), Loop()
    slow = apart.client(dial(server), ClientOptions("job/", ttl_s=60.0, answer_timeout_s=30.0))
    both = [loop, apart]
    loop.until(lambda: [one.turn(0.005) for one in both] and brisk.is_connected and slow.is_connected, "connected")
    entry = loop.cas(brisk, "job/large", "", 0)
    for number in range(10, 40):
        entry = loop.cas(brisk, "job/large", str(number) + "x" * 500_000, entry.revision)
    waiting = max(len(one.out) for one in server._connections)
    assert 0 < waiting < PUSH_BELOW_BYTES + LARGEST_FRAME_BYTES
    assert server.connections == 2
    seen: set[str] = set()

    def caught_up() -> bool:
        apart.turn(0.005)
        seen.update(one.value[:2] for one in slow.snapshot().values())
        return slow.snapshot() == brisk.snapshot()

    loop.until(caught_up, "the slow one has caught up", 10.0)
    assert len(seen) < 20  # of what changed meanwhile it was sent the last only
    apart.close()


def test_who_asks_and_does_not_read_is_dropped(loop: Loop) -> None:
    store = ControlStore()
    store.cas("job/large", "x" * 900_000, 0)
    server = loop.server(store)
    channel, sock = Channel(SECRET, is_server=False), socket.create_connection(server.address)
    sock.sendall(channel.take_handshake())
    loop.spin(0.1)
    channel.feed(sock.recv(4096))
    sock.sendall(channel.take_handshake())
    sock.sendall(b"".join(channel.outgoing({"id": n, "do": "get", "key": "job/large"}) for n in range(50)))
    largest = 0
    end_s = time.monotonic() + 5
    while server.connections and time.monotonic() < end_s:
        largest = max([largest, *(len(one.out) for one in server._connections)])
        loop.turn()
    assert server.connections == 0
    assert largest <= LARGEST_BUFFER_BYTES + LARGEST_FRAME_BYTES
    sock.close()


def test_a_client_that_reads_nothing_for_long_is_dropped(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "STALLED_S", 1.0)
    store = ControlStore()
    server = loop.server(store)
    brisk, apart = loop.client(dial(server)), Loop()
    slow = apart.client(dial(server))
    loop.until(lambda: [apart.turn(0.005)] and brisk.is_connected and slow.is_connected, "connected")
    loop.spin(1.1)
    assert server.connections == 2  # quiet, but not stuck
    for number in range(12):
        store.cas(f"job/{number}", "x" * 900_000, 0)
    loop.until(lambda: server.connections == 1, "it is dropped", 30.0)
    assert brisk.is_connected
    loop.until(lambda: len(brisk.snapshot()) == 12, "the other has everything", 30.0)
    apart.close()


def test_a_server_that_was_late_itself_drops_no_client(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection is dropped if the client reads nothing, not if the server did not try to send."""
    monkeypatch.setattr(module, "STALLED_S", 0.5)
    store = ControlStore()
    server = loop.server(store)
    client = loop.client(dial(server))
    loop.connected(client)
    for number in range(12):
        store.cas(f"job/{number}", "x" * 900_000, 0)
    server.tick(time.monotonic())
    (connection,) = server._connections
    assert connection.out  # more than fits into the socket
    (reader,) = (key for key in loop.selector.get_map().values() if key.data not in (server, connection))
    for _ in range(20):
        reader.data.ready(selectors.EVENT_READ)
    time.sleep(0.6)  # as if this process had been stopped
    server.tick(time.monotonic())
    assert server.connections == 1
    loop.until(lambda: len(client.snapshot()) == 12, "the client has everything", 30.0)


# ------------------------------------------------------------------------------------------------------------ the lease


def test_what_hangs_on_a_lease_stays_while_it_is_renewed_and_goes_when_its_holder_stops(loop: Loop) -> None:
    store = ControlStore()
    server = loop.server(store)
    apart = Loop()
    holder, watcher = apart.client(dial(server), ClientOptions("job/", ttl_s=2.0)), loop.client(dial(server))
    loop.until(lambda: [apart.turn(0.005)] and holder.is_connected and watcher.is_connected, "connected")
    heard: list[Any] = []
    holder.cas("job/mine", 1, 0, leased=True, then=heard.append)
    loop.until(lambda: [apart.turn(0.005)] and heard, "an answer")
    end_s = time.monotonic() + 3.0
    while time.monotonic() < end_s:
        apart.turn(0.005)
        loop.turn(0.005)
        assert store.get("job/mine") is not None
        assert holder.held_until_s > time.monotonic()
    promised_s = holder.held_until_s
    loop.until(lambda: "job/mine" not in watcher.snapshot(), "the key is gone", 5.0)
    assert promised_s <= time.monotonic() < promised_s + 2.0
    assert apart.lost == []
    apart.turn(0.0)
    assert len(apart.lost) == 1
    assert "not renewed for 2 s" in apart.lost[0]
    loop.until(lambda: [apart.turn(0.005)] and holder.held_until_s > time.monotonic(), "a new lease")
    apart.close()


def test_who_leaves_takes_its_keys_along_at_once(loop: Loop) -> None:
    store = ControlStore()
    server = loop.server(store)
    client = loop.client(dial(server), ClientOptions("job/", ttl_s=60.0))
    loop.connected(client)
    loop.cas(client, "job/mine", 1, 0, leased=True)
    loop.cas(client, "job/for good", 1, 0)
    client.close()
    loop.until(lambda: list(store.list("")) == ["job/for good"], "the leased key is gone")
    assert client.held_until_s == -math.inf
    loop.spin(0.1)
    assert server.connections == 0  # it does not come back


def test_a_lease_that_the_store_ends_is_lost_and_followed_by_a_new_one(loop: Loop) -> None:
    store = ControlStore()
    server = loop.server(store)
    client = loop.client(dial(server), ClientOptions("job/", ttl_s=4.0))
    loop.connected(client)
    mine = loop.cas(client, "job/mine", 1, 0, leased=True)
    store.revoke(mine.lease)
    loop.until(lambda: loop.lost, "it is told", 8.0)
    assert "the store has ended it" in loop.lost[0]
    loop.until(lambda: client.held_until_s > time.monotonic(), "a new lease")
    again = loop.cas(client, "job/mine", 2, 0, leased=True)
    assert again.lease not in (None, mine.lease)
    assert len(loop.lost) == 1


# ----------------------------------------------------------------------------------------------------- lost connections


def test_a_lost_connection_comes_back_with_the_same_lease(loop: Loop) -> None:
    store = ControlStore()
    server = loop.server(store)
    client = loop.client(dial(server))
    loop.connected(client)
    mine = loop.cas(client, "job/mine", 1, 0, leased=True)
    under_way: list[Any] = []
    server._drop_all(list(server._connections))
    client.cas("job/other", 1, 0, then=under_way.append)
    loop.until(lambda: under_way, "it hears that the result is not known")
    assert under_way[0].may_have_happened
    assert "look at the next snapshot" in str(under_way[0])
    assert not client.is_connected
    assert client.snapshot() == {"job/mine": mine}  # old, but better than nothing
    client.cas("job/other", 1, 0, then=under_way.append)
    loop.turn(0)
    assert not under_way[1].may_have_happened
    loop.connected(client)
    assert client.snapshot() == store.list("job/")
    assert store.get("job/mine") == mine
    assert loop.lost == []


def test_a_server_that_comes_back_empty_is_another_store(loop: Loop) -> None:
    server = loop.server(ControlStore())
    address = server.address
    client = loop.client(TcpDial(*address))
    loop.connected(client)
    mine = loop.cas(client, "job/mine", 1, 0, leased=True)
    server.close()
    loop.parts.remove(server)
    loop.until(lambda: not client.is_connected, "the client notices")
    store = ControlStore()
    store.cas("job/new", 1, 0)
    loop.server(store, address[1])
    loop.connected(client)
    assert list(client.snapshot()) == ["job/new"]
    assert len(loop.lost) == 1
    assert "or is another one than before" in loop.lost[0]
    assert loop.cas(client, "job/mine", 2, mine.revision) is None
    assert loop.cas(client, "job/mine", 2, 0, leased=True).value == 2


def test_a_store_that_does_not_come_back_in_time_costs_the_lease(loop: Loop) -> None:
    server = loop.server(ControlStore())
    client = loop.client(dial(server), ClientOptions("job/", ttl_s=0.5))
    loop.connected(client)
    promised_s, server_address = client.held_until_s, server.address
    loop.parts.remove(server)
    server.close()
    loop.until(lambda: loop.lost, "it is told", 3.0)
    assert promised_s <= time.monotonic() < promised_s + 2.0
    host, port = server_address
    assert f"the connection to the control store at {host}:{port} was lost" in loop.lost[0]
    assert client.held_until_s == -math.inf
    loop.spin(0.2)
    assert len(loop.lost) == 1


def test_who_is_silent_or_another_is_given_up_and_said_to_be(loop: Loop) -> None:
    with deaf_listener() as address:
        silent = loop.client(TcpDial(*address), ClientOptions("job/", answer_timeout_s=0.3))
        loop.until(lambda: "nothing was received for 0.3 s" in silent.disconnect_reason, "the limit is reached")
    server = loop.server(ControlStore())
    wrong = loop.client(dial(server), secret=bytes(32))
    loop.until(lambda: "the secrets may differ" in wrong.disconnect_reason, "it is refused")
    with deaf_listener() as address:
        pass
    client = loop.client(TcpDial(*address))
    loop.until(lambda: "refused" in client.disconnect_reason, "no server is there")
    answers: list[Any] = []
    client.cas("job/a", 1, 0, then=answers.append)
    loop.turn(0)
    assert "refused" in str(answers[0])


def test_attempts_become_rarer_and_are_never_all_at_once() -> None:
    assert [backoff(n, jitter=1.0) for n in range(5)] == [0.05, 0.1, 0.2, 0.4, 0.8]
    assert backoff(10**9, jitter=1.0) == 2.0
    assert backoff(3, jitter=0.0) == 0.2
    rng = random.Random(0)
    assert len({backoff(9, jitter=rng.random()) for _ in range(100)}) == 100


def test_a_server_that_refuses_is_not_asked_all_the_time(loop: Loop) -> None:
    refusing = Liar()
    refusing.refuses = True
    loop.client(refusing)
    loop.spin(1.0)
    assert 4 <= refusing.dialled <= 8


def test_a_progress_timeout_counts_from_the_first_tick() -> None:
    timeout = ProgressTimeout(2.0)
    assert timeout.deadline_s(10.0, waiting=False) == math.inf
    assert timeout.deadline_s(20.0, waiting=True) == 22.0
    assert timeout.deadline_s(21.0, waiting=True) == 22.0
    timeout.reset()
    assert timeout.deadline_s(21.0, waiting=True) == 23.0
    assert timeout.deadline_s(22.0, waiting=False) == math.inf
    assert timeout.deadline_s(22.5, waiting=True) == 24.5


def test_where_the_store_is_can_be_written_in_two_ways(loop: Loop) -> None:
    store = ControlStore()
    host, port = loop.server(store).address
    client = loop.add(connect_store(f"{host}:{port}", SECRET, loop.selector, options=OPTIONS, on_lost=loop.lost.append))
    loop.connected(client)
    bridged = loop.add(
        connect_store("etcd://127.0.0.1:1", SECRET, loop.selector, options=OPTIONS, on_lost=loop.lost.append)
    )
    loop.until(lambda: "etcd does not answer" in bridged.disconnect_reason, "no server is there", 10.0)
    with pytest.raises(ValueError, match="names 2 hosts, and only one"):
        connect_store("a:1,b:2", SECRET, loop.selector, options=OPTIONS, on_lost=loop.lost.append)


def test_a_name_that_is_unknown_is_said_so_at_once() -> None:
    with pytest.raises(OSError, match="'no such host' has no address"):
        TcpDial("no such host", 1)
    with pytest.raises(ValueError, match="answer timeout"):
        ClientOptions("job/", answer_timeout_s=0)
    with pytest.raises(ValueError, match="at least one character"):
        ClientOptions("")


# ------------------------------------------------------------------------------- a store that knows the secret and lies


class Liar:
    """Holds the other end, knows the secret, and says what it is told to."""

    def __init__(self) -> None:
        self.dialled = 0
        self.refuses = False

    def __call__(self) -> socket.socket:
        self.dialled += 1
        if self.refuses:
            raise ConnectionRefusedError("no")
        ours, self.sock = socket.socketpair()
        self.sock.setblocking(False)
        ours.setblocking(False)
        self.channel = Channel(SECRET, is_server=True)
        return ours

    def close(self) -> None:
        pass

    def hear(self) -> list[dict[str, Any]]:
        if not self.dialled:
            return []
        try:
            data = self.sock.recv(65536)
        except BlockingIOError:
            return []
        messages = self.channel.feed(data)
        if data:
            self.sock.sendall(self.channel.take_handshake())
        return messages

    def say(self, message: dict[str, Any]) -> None:
        self.sock.sendall(self.channel.outgoing(message))


WHOLE = {"changes": [["job/a", 5, 1, None]], "revision": 5, "anew": True, "complete": True}


def test_a_store_that_talks_nonsense_is_left_and_the_host_agent_lives(loop: Loop) -> None:
    lies: list[dict[str, Any]] = [
        {}, {"id": 99}, {"id": "1"}, {"id": 1}, {"id": 1, "lease": 7}, {"id": 1, "error": 7},
        {"id": 1, "error": "full"}, {"changes": []}, {**WHOLE, "anew": False},
        {**WHOLE, "changes": [[1]]}, {"trouble": "no etcd"}, {"trouble": 1},
    ]  # fmt: skip
    for lie in lies:
        liar = Liar()
        client = loop.client(liar)
        loop.until(lambda liar=liar: [one for one in liar.hear() if one["do"] == "grant"], "it asks for a lease")
        liar.say(lie)
        loop.until(lambda liar=liar: liar.dialled == 2, f"it tries elsewhere after {lie}")
        assert not client.is_connected
        assert client.snapshot() == {}
        loop.parts.remove(client)
        client.close()


def test_an_answer_that_the_records_never_show_ends_the_connection(loop: Loop) -> None:
    liar = Liar()
    client = loop.client(liar, ClientOptions("job/", ttl_s=60.0, answer_timeout_s=0.3))
    heard: list[Any] = []
    asked = False
    end_s = time.monotonic() + 5
    while not heard and time.monotonic() < end_s:
        for message in liar.hear():
            if message["do"] == "grant":
                liar.say({"id": message["id"], "lease": "l"})
            elif message["do"] == "watch":
                liar.say({"id": message["id"], "done": True})
                liar.say(WHOLE)
            elif message["do"] == "cas":
                liar.say({"id": message["id"], "done": True, "revision": 6})
        if client.is_connected and not asked:
            asked = True
            client.cas("job/a", 2, 5, then=heard.append)
        loop.turn(0.01)
    assert heard == [StoreEntry(2, 6)]  # it did happen
    assert "no records came for 0.3 s" in client.disconnect_reason


def test_a_lease_counts_from_the_question_and_one_that_was_given_up_is_returned(loop: Loop) -> None:
    liar = Liar()
    client = loop.client(liar, ClientOptions("job/", ttl_s=1.0, answer_timeout_s=30.0))
    asked: list[dict[str, Any]] = []

    def hears(do: str) -> bool:
        asked.extend(liar.hear())
        return do in [one["do"] for one in asked]

    loop.until(lambda: hears("grant"), "it asks for a lease")
    heard_s = time.monotonic()
    loop.spin(0.4)
    liar.say({"id": asked[0]["id"], "lease": "the first"})
    loop.until(lambda: hears("watch"), "it goes on")
    assert heard_s < client.held_until_s <= heard_s + 1.0
    loop.until(lambda: hears("keep_alive"), "it renews")
    assert loop.lost == []
    loop.until(lambda: loop.lost, "its renewal was not answered in time", 2.0)
    assert client.held_until_s == -math.inf
    renewal = next(one for one in asked if one["do"] == "keep_alive")
    asked.clear()
    liar.say({"id": renewal["id"], "done": True})  # too late
    loop.until(lambda: hears("grant"), "it asks for another")
    assert [(one["do"], one.get("lease")) for one in asked] == [("revoke", "the first"), ("grant", None)]
    assert client.held_until_s == -math.inf
    assert len(loop.lost) == 1
