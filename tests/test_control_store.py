"""The control store itself, in memory: compare-and-swap, leases, revisions, what a watcher is told, what is refused."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from lockstep.control import store as module
from lockstep.control.remote_store import Mirror
from lockstep.control.store import (
    Change,
    ClientOptions,
    ControlError,
    ControlStore,
    LocalStoreClient,
    StoreEntry,
)
from lockstep.control.wire import LARGEST_FRAME_BYTES, PAGE_BYTES, Channel, cut_pages, follow, message_as_push


def made(entry: StoreEntry | None) -> StoreEntry:
    assert entry is not None
    return entry


# ----------------------------------------------------------------------------------------------------- compare and swap


def test_a_key_is_set_only_by_who_knows_its_revision() -> None:
    store = ControlStore()
    first = made(store.cas("a", 1, 0))
    assert store.cas("a", 2, 0) is None
    assert store.cas("a", 2, first.revision + 1) is None
    assert store.get("a") == first == StoreEntry(1, store.revision)
    second = made(store.cas("a", 2, first.revision))
    assert store.cas("a", 3, first.revision) is None
    assert store.get("a") == second
    assert second.revision == store.revision == first.revision + 1


def test_a_key_is_deleted_only_by_who_knows_its_revision_and_can_be_made_again() -> None:
    store = ControlStore()
    first = made(store.cas("a", 1, 0))
    assert not store.delete("a", first.revision + 1)
    assert not store.delete("b", 0)
    assert store.delete("a", first.revision)
    assert store.get("a") is None
    assert not store.delete("a", first.revision)
    assert store.cas("a", 2, first.revision) is None
    assert made(store.cas("a", 2, 0)).revision == first.revision + 2


def test_what_fails_changes_no_revision() -> None:
    store = ControlStore()
    store.cas("a", 1, 0)
    before = store.revision
    store.cas("a", 2, 0)
    store.delete("a", 1)
    store.revoke("unknown")
    store.expire(1e9)
    assert store.revision == before


def test_revisions_of_one_store_mean_nothing_in_the_next() -> None:
    """After a restart, a client that still knows a revision must not hit another record by chance."""
    assert len({ControlStore().revision for _ in range(100)}) == 100
    old, new = ControlStore(), ControlStore()
    seen = made(old.cas("a", 1, 0))
    new.cas("a", "another", 0)
    assert new.cas("a", 2, seen.revision) is None
    assert new.changes_after(old.revision) is None


def test_values_are_copies_as_all_clients_will_read_them() -> None:
    store = ControlStore()
    mine: dict[Any, Any] = {"list": [1, (2, 3)], 4: None}
    store.cas("a", mine, 0)
    mine["list"].append("later")
    assert made(store.get("a")).value == {"list": [1, [2, 3]], "4": None}


# --------------------------------------------------------------------------------------------------------------- leases


def test_keys_go_with_their_lease_and_not_before() -> None:
    store = ControlStore()
    lease = store.grant(3.0, now_s=100.0)
    store.cas("mine", 1, 0, lease)
    store.cas("free", 1, 0)
    assert store.next_end_s() == 103.0
    store.expire(102.9)
    assert store.get("mine") == StoreEntry(1, store.revision - 1, lease)
    store.expire(103.0)
    assert store.get("mine") is None
    assert store.get("free") is not None
    assert not store.keep_alive(lease, 103.0)
    with pytest.raises(ValueError, match="has ended; ask for a new one"):
        store.cas("mine", 1, 0, lease)


def test_a_renewed_lease_counts_from_its_renewal() -> None:
    store = ControlStore()
    lease = store.grant(3.0, now_s=100.0)
    store.cas("mine", 1, 0, lease)
    assert store.keep_alive(lease, 102.0)
    store.expire(104.9)
    assert store.get("mine") is not None
    store.expire(105.0)
    assert store.get("mine") is None


def test_a_renewal_that_waited_while_the_host_was_stopped_counts() -> None:
    store = ControlStore()
    lease = store.grant(3.0, now_s=100.0)
    assert store.keep_alive(lease, 120.0)  # expire was not called
    store.expire(120.0)
    assert store.keep_alive(lease, 121.0)


def test_a_key_hangs_on_the_lease_it_was_last_set_with() -> None:
    store = ControlStore()
    one, two = store.grant(3.0, 0.0), store.grant(9.0, 0.0)
    first = made(store.cas("a", 1, 0, one))
    second = made(store.cas("a", 2, first.revision, two))
    store.expire(3.0)
    assert store.get("a") == second
    third = made(store.cas("a", 3, second.revision))
    store.revoke(two)
    assert store.get("a") == third


def test_leases_are_unguessable_and_revoked_at_once() -> None:
    store = ControlStore()
    leases = {store.grant(1.0, 0.0) for _ in range(100)}
    assert len(leases) == 100
    assert all(len(lease) == 32 for lease in leases)
    lease = leases.pop()
    store.cas("a", 1, 0, lease)
    assert store.revoke(lease)
    assert not store.revoke(lease)
    assert store.get("a") is None


# -------------------------------------------------------------------------------------------------- what a watcher sees


def test_changes_are_the_last_of_each_key_in_order() -> None:
    store = ControlStore()
    start = store.revision
    a = made(store.cas("a", 1, 0))
    b = made(store.cas("b", 1, 0))
    a = made(store.cas("a", 2, a.revision))
    assert store.changes_after(start) == [Change("b", b.revision, b), Change("a", a.revision, a)]
    store.delete("b", b.revision)
    assert store.changes_after(a.revision) == [Change("b", store.revision, None)]
    assert store.changed_at("b") == store.revision
    assert store.changes_after(store.revision) == []
    assert store.changes_after(store.revision + 1) is None
    assert store.changes_after(start - 1) is None


def test_deletions_are_forgotten_after_so_many_and_no_client_misses_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_DELETIONS", 5)
    store = ControlStore()
    start = store.revision
    for number in range(6):
        entry = made(store.cas(f"k{number}", 1, 0))
        store.delete(f"k{number}", entry.revision)
    assert store.changes_after(start) is None  # k0 is missing
    changes = store.changes_after(start + 2)
    assert changes is not None
    assert [change.key for change in changes] == ["k1", "k2", "k3", "k4", "k5"]


@pytest.mark.parametrize("seed", range(5))
def test_a_mirror_that_looks_now_and_then_is_what_the_store_has(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_DELETIONS", 20)
    rng, store = random.Random(seed), ControlStore()
    leases: list[str] = []
    mirrors = [(Mirror(), follow(store, "in/")) for _ in range(3)]
    for now_s in range(600):
        key = f"{rng.choice(['in', 'out'])}/{rng.randrange(30)}"
        entry = store.get(key)
        revision = entry.revision if entry and rng.random() < 0.9 else 0
        doing = rng.random()
        if doing < 0.6:
            lease = rng.choice([*leases, None])
            if lease is None or store.keep_alive(lease, now_s - 5):
                store.cas(key, rng.randrange(1000), revision, lease)
        elif doing < 0.9:
            store.delete(key, revision)
        else:
            leases.append(store.grant(rng.randrange(1, 40), now_s))
        store.expire(now_s)
        mirror, pushes = rng.choice(mirrors[:2])  # the third looks once, at the end: it is told everything anew
        if rng.random() < 0.5:
            look(mirror, pushes)
            assert mirror.entries == store.list("in/")
    for mirror, pushes in mirrors:
        look(mirror, pushes)
        assert mirror.entries == store.list("in/")
        assert mirror.revision <= store.revision


def look(mirror: Mirror, pushes: Any) -> None:
    while (push := next(pushes)) is not None:
        mirror.apply(message_as_push(push.as_message()))


def test_a_round_in_several_pushes_is_seen_all_at_once() -> None:
    store = ControlStore()
    for number in range(10):
        store.cas(f"k{number}", "x" * (PAGE_BYTES // 3), 0)
    mirror, pushes = Mirror(), follow(store, "k")
    seen = []
    while (push := next(pushes)) is not None:
        mirror.apply(push)
        seen.append(len(mirror.entries))
    assert len(seen) >= 4
    assert seen == [0] * (len(seen) - 1) + [10]


def test_the_largest_values_fit_into_frames() -> None:
    full = "x" * (module.LARGEST_VALUE_BYTES - 2)
    changes = [Change("k" * 256, 2**53, StoreEntry(full, 2**53, "l" * 32)) for _ in range(3)]
    small = [Change("k" * 256, 1, StoreEntry("x" * (PAGE_BYTES - 1000), 1)) for _ in range(3)]
    client, server = opened()
    for page in cut_pages([*small, *changes]):
        client.feed(server.outgoing({"changes": [[c.key, c.revision, made(c.entry).value, None] for c in page]}))
    assert len(cut_pages([])) == 1
    with pytest.raises(ValueError, match=f"at most {LARGEST_FRAME_BYTES}"):
        server.outgoing({"value": [full, full]})


def opened() -> tuple[Channel, Channel]:
    client, server = Channel(bytes(32), is_server=False), Channel(bytes(32), is_server=True)
    server.feed(client.take_handshake())
    client.feed(server.take_handshake())
    server.feed(client.take_handshake())
    return client, server


# ------------------------------------------------------------------------------------------------------ what it refuses


def deep(levels: int) -> Any:
    return [deep(levels - 1)] if levels else 0


cycle: list[Any] = []
cycle.append(cycle)

BAD: list[tuple[Callable[[ControlStore], Any], str]] = [
    (lambda s: s.cas("", 1, 0), "at least one character"),
    (lambda s: s.cas(7, 1, 0), "must be text"),
    (lambda s: s.cas("k" * 257, 1, 0), "has 257 bytes; at most 256"),
    (lambda s: s.cas("é" * 129, 1, 0), "has 258 bytes"),
    (lambda s: s.cas("\ud800", 1, 0), "not valid Unicode"),
    (lambda s: s.cas("a", "x" * (1 << 20), 0), "has 1048578 bytes as JSON; at most 1048576"),
    (lambda s: s.cas("a", float("nan"), 0), "plain JSON"),
    (lambda s: s.cas("a", [float("inf")], 0), "plain JSON"),
    (lambda s: s.cas("a", {1, 2}, 0), "plain JSON"),
    (lambda s: s.cas("a", b"x", 0), "plain JSON"),
    (lambda s: s.cas("a", cycle, 0), "plain JSON"),
    (lambda s: s.cas("a", deep(100_000 // 200), 0), "more than 32 deep"),
    (lambda s: s.cas("a", deep(33), 0), "more than 32 deep"),
    (lambda s: s.cas("a", 1, -1), "whole number"),
    (lambda s: s.cas("a", 1, True), "whole number"),
    (lambda s: s.cas("a", 1, 0.0), "whole number"),
    (lambda s: s.cas("a", 1, 0, "no such lease"), "which has ended"),
    (lambda s: s.delete("a", None), "whole number"),
    (lambda s: s.grant(0.0, 0.0), "must be 0.05 to 86400"),
    (lambda s: s.grant(float("nan"), 0.0), "must be"),
    (lambda s: s.grant("1", 0.0), "must be"),
]


@pytest.mark.parametrize("number", range(len(BAD)))
def test_bad_input_is_refused_in_words_and_changes_nothing(number: int) -> None:
    store = ControlStore()
    store.cas("kept", 1, 0)
    revision, before = store.revision, store.list("")
    call, words = BAD[number]
    with pytest.raises(ValueError, match=words):
        call(store)
    assert (store.revision, store.list("")) == (revision, before)


def test_limits_are_reached_and_not_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_KEYS", 3)
    monkeypatch.setattr(module, "MOST_LEASES", 2)
    store = ControlStore()
    entries = [made(store.cas(f"k{number}", deep(31), 0)) for number in range(3)]
    with pytest.raises(ValueError, match="one more than 3 keys"):
        store.cas("k3", 1, 0)
    assert store.cas("k0", 2, entries[0].revision) is not None
    store.delete("k1", entries[1].revision)
    assert store.cas("k3", "x" * ((1 << 20) - 2), 0) is not None
    store.grant(1, 0)
    store.grant(1, 0)
    with pytest.raises(ValueError, match="2 leases already"):
        store.grant(1, 0)
    store.expire(1)
    assert store.grant(1, 1)


# ---- the control store on this host ---------------------------------------------------------------------------------


def local(store: ControlStore, lost: list[str] | None = None) -> LocalStoreClient:
    return LocalStoreClient(
        store, options=ClientOptions("job/", ttl_s=3.0), on_lost=[].append if lost is None else lost.append
    )


def test_a_local_arbiter_tells_its_answers_in_the_next_tick() -> None:
    store, heard = ControlStore(), []
    client = local(store)
    client.cas("job/a", 1, 0, leased=True, then=heard.append)
    assert client.tick(10.0) == 10.0 + 1.0
    assert isinstance(heard[0], ControlError)
    assert not heard[0].may_have_happened
    client.cas("job/a", 1, 0, leased=True, then=heard.append)
    client.cas("job/a", 2, 0, then=heard.append)
    client.delete("job/a", 1, then=heard.append)
    assert len(heard) == 1
    client.tick(10.0)
    assert heard[1:] == [client.snapshot()["job/a"], None, False]
    with pytest.raises(ValueError, match="not below 'job/'"):
        client.cas("other", 1, 0, then=heard.append)


def test_a_local_arbiter_renews_in_time_even_after_a_stop_and_leaves_nothing() -> None:
    store, lost = ControlStore(), []
    client = local(store, lost)
    client.tick(10.0)
    client.cas("job/a", 1, 0, leased=True, then=lambda _: None)
    assert client.held_until_s == 13.0
    now_s = 10.0
    while now_s < 20.0:
        store.expire(now_s)
        now_s = client.tick(now_s)
    assert client.held_until_s > 20.0
    client.tick(100.0)  # before the server expires anything
    store.expire(100.0)
    assert list(client.snapshot()) == ["job/a"]
    store.expire(200.0)
    client.tick(200.0)
    assert lost == ["the store on this host has ended our lease"]
    assert client.held_until_s == 203.0
    client.cas("job/b", 1, 0, leased=True, then=lambda _: None)
    client.close()
    assert client.snapshot() == {}


def test_a_snapshot_never_changes() -> None:
    store = ControlStore()
    client = local(store)
    store.cas("job/a", 1, 0)
    store.cas("elsewhere", 1, 0)
    before, revision = client.snapshot(), client.revision
    store.cas("job/b", 1, 0)
    assert list(before) == ["job/a"]
    assert sorted(client.snapshot()) == ["job/a", "job/b"]
    assert client.revision > revision
