"""The control store over a real etcd: the same promises, and members that are killed, stopped and started again.

Needs the `etcd` program, on PATH or in $ETCD (Debian: `apt-get install etcd-server`).
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lockstep.control.connection import parse_addresses
from lockstep.control.etcd import Bridge, Etcd
from lockstep.control.etcd_gateway import EtcdAccess, Gateway, LoginFailed, Unreachable
from lockstep.control.remote_store import RemoteStoreClient
from lockstep.control.store import ClientOptions
from lockstep.control.wire import new_secret
from lockstep.launcher.hosts import Hosts, check_etcd
from test_control_client import Loop

ETCD = os.environ.get("ETCD") or shutil.which("etcd")
needs_etcd = pytest.mark.skipif(ETCD is None, reason="no etcd on PATH or in $ETCD; `apt-get install etcd-server`")
SECRET = new_secret()


def free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [sock.getsockname()[1] for sock in sockets]


class Cluster:
    def __init__(self, folder: Path, members: int, **options: object) -> None:
        ports = free_ports(2 * members)
        self.folder, self._options = folder, options
        self.ports, self._peer_ports = ports[:members], ports[members:]
        self.processes: dict[int, subprocess.Popen[bytes]] = {}

    @property
    def url(self) -> str:
        return "etcd://" + ",".join(f"127.0.0.1:{port}" for port in self.ports)

    def start(self, *members: int) -> None:
        for member in members:
            here, peer = (f"http://127.0.0.1:{ports[member]}" for ports in (self.ports, self._peer_ports))
            peers = ",".join(f"m{n}=http://127.0.0.1:{port}" for n, port in enumerate(self._peer_ports))
            options = {
                "name": f"m{member}", "data-dir": self.folder / f"m{member}", "listen-client-urls": here,
                "advertise-client-urls": here, "listen-peer-urls": peer, "initial-advertise-peer-urls": peer,
                "initial-cluster": peers,
            } | self._options  # fmt: skip
            command = [f"--{name}={value}" for name, value in options.items()]
            with (self.folder / f"m{member}.log").open("ab") as log:
                self.processes[member] = subprocess.Popen([str(ETCD), *command], stdout=log, stderr=log)
        for member in members:
            self.wait_until_healthy(member)

    def wait_until_healthy(self, member: int) -> None:
        end_s = time.monotonic() + 20
        while True:
            with suppress(OSError, ValueError):
                with urllib.request.urlopen(f"http://127.0.0.1:{self.ports[member]}/health", timeout=1) as answer:
                    if json.loads(answer.read())["health"] == "true":
                        return
            assert time.monotonic() < end_s, f"member {member} does not start: {self.folder}/m{member}.log"
            time.sleep(0.05)

    def kill(self, member: int) -> None:
        self.processes[member].kill()
        self.processes.pop(member).wait()

    def close(self) -> None:
        for process in self.processes.values():
            process.kill()
            process.wait()


@contextmanager
def cluster(folder: Path, members: int = 1) -> Iterator[Cluster]:
    made = Cluster(folder, members)
    try:
        made.start(*range(members))
        yield made
    finally:
        made.close()


@pytest.fixture(scope="module")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """One that is not killed."""
    with cluster(tmp_path_factory.mktemp("etcd")) as one:
        yield one


class Team(Loop):
    """Clients with a bridge each."""

    def __init__(self) -> None:
        super().__init__()
        self.bridges: list[Bridge] = []

    def join(self, url: str, prefix: str = "job/", ttl_s: float = 10.0) -> RemoteStoreClient:
        bridge = Bridge(url, SECRET)
        self.bridges.append(bridge)
        return self.client(bridge, ClientOptions(prefix, ttl_s=ttl_s), SECRET)

    def pid_of(self, number: int) -> int:
        process = self.bridges[number]._process
        assert process is not None
        return process.pid

    def count(self, client: RemoteStoreClient, key: str, up_to: int, within_s: float) -> float:
        """Count a key up by swaps, whatever happens meanwhile, and return the longest time between two of them."""
        end_s = last_s = time.monotonic() + 0.0
        end_s += within_s
        longest_s = 0.0
        while (value := getattr(client.snapshot().get(key), "value", 0)) < up_to or not client.is_connected:
            assert time.monotonic() < end_s, f"at {value} of {up_to} after {within_s} s; {client.disconnect_reason}"
            if not client.is_connected:
                self.turn()
                continue
            entry = client.snapshot().get(key)
            answer = self.cas(client, key, value + 1, 0 if entry is None else entry.revision)
            if getattr(answer, "value", None) == value + 1:
                longest_s, last_s = max(longest_s, time.monotonic() - last_s), time.monotonic()
        return longest_s


@pytest.fixture
def team() -> Iterator[Team]:
    made = Team()
    yield made
    made.close()


# --------------------------------------------------------------------------------------------------------- the promises


@needs_etcd
def test_it_keeps_the_same_promises_as_our_own_store(team: Team, etcd: Cluster) -> None:
    one, two = team.join(etcd.url, "same/"), team.join(etcd.url, "same/")
    team.connected(one, two, within_s=10.0)
    assert one.snapshot() == {}
    value = {"text": "é\u2028\ud800", "list": [1, 2.5, None, True]}
    made = team.cas(one, "same/a", value, 0)
    assert made.value == value
    assert one.snapshot()["same/a"] == made
    assert team.cas(one, "same/a", 2, 0) is None
    assert team.cas(two, "same/a", 2, made.revision - 1) is None
    assert two.snapshot()["same/a"] == made
    again = team.cas(two, "same/a", 2, made.revision)
    assert again.revision > made.revision
    assert team.cas(one, "same/a", 3, made.revision) is None
    assert one.snapshot()["same/a"] == again  # who loses sees who won
    assert team.delete(one, "same/a", made.revision) is False
    assert team.delete(one, "same/b", 0) is False
    assert team.delete(one, "same/a", again.revision) is True
    assert one.snapshot() == {}
    assert team.cas(one, "same/a", 4, again.revision) is None
    team.until(lambda: two.snapshot() == {}, "the other sees it, too")
    assert team.cas(two, "same/a", 4, 0).value == 4
    with pytest.raises(ValueError, match="not below"):
        one.cas("same", 1, 0, then=print)


@needs_etcd
def test_swaps_of_several_hosts_are_lost_by_none(team: Team, etcd: Cluster) -> None:
    clients = [team.join(etcd.url, "race/") for _ in range(3)]
    team.connected(*clients, within_s=15.0)
    left = {client: 10 for client in clients}

    def swap(client: RemoteStoreClient) -> None:
        entry = client.snapshot().get("race/n")
        value, revision = (0, 0) if entry is None else (entry.value, entry.revision)

        def then(result: Any) -> None:
            left[client] -= result is not None
            if left[client]:
                swap(client)

        client.cas("race/n", value + 1, revision, then=then)

    for client in clients:
        swap(client)
    team.until(lambda: not any(left.values()), "all have counted", 30.0)
    assert max(client.snapshot()["race/n"].value for client in clients) == 30


@needs_etcd
def test_records_of_any_size_and_number_are_mirrored(team: Team, etcd: Cluster) -> None:
    one = team.join(etcd.url, "many/")
    team.connected(one, within_s=10.0)
    heard: list[Any] = []
    for number in range(150):
        one.cas(f"many/{number}", number, 0, then=heard.append)
    one.cas("many/large", "x" * ((1 << 20) - 2), 0, then=heard.append)
    team.until(lambda: len(heard) == 151, "all are written", 20.0)
    two = team.join(etcd.url, "many/")
    team.connected(two, within_s=10.0)
    assert two.snapshot() == one.snapshot()
    assert len(two.snapshot()) == 151
    found = Etcd(Gateway(parse_addresses(etcd.url))).list("many/1", "many/10", most=5)
    assert [change.key for change in found.changes] == [f"many/{n}" for n in (100, 101, 102, 103, 104)]


@needs_etcd
def test_keys_go_with_the_lease_of_a_host_that_stops(team: Team, etcd: Cluster) -> None:
    apart = Team()
    holder, watcher = apart.join(etcd.url, "lease/", ttl_s=2.0), team.join(etcd.url, "lease/")
    team.until(lambda: [apart.turn(0.005)] and holder.is_connected and watcher.is_connected, "connected", 10.0)
    heard: list[Any] = []
    holder.cas("lease/mine", 1, 0, leased=True, then=heard.append)
    team.until(lambda: [apart.turn(0.005)] and "lease/mine" in watcher.snapshot(), "it is seen")
    end_s = time.monotonic() + 3.5
    while time.monotonic() < end_s:
        apart.turn(0.005)
        team.turn(0.005)
        assert "lease/mine" in watcher.snapshot()
    promised_s = holder.held_until_s
    team.until(lambda: "lease/mine" not in watcher.snapshot(), "the key is gone", 8.0)
    assert time.monotonic() >= promised_s
    apart.turn(0)
    assert len(apart.lost) == 1
    team.until(lambda: [apart.turn(0.005)] and holder.held_until_s > time.monotonic(), "a new lease")
    holder.cas("lease/mine", 2, 0, leased=True, then=heard.append)
    team.until(lambda: [apart.turn(0.005)] and "lease/mine" in watcher.snapshot(), "it is seen again")
    apart.close()
    team.until(lambda: "lease/mine" not in watcher.snapshot(), "who leaves takes its keys along", 1.5)


@needs_etcd
def test_a_lease_that_etcd_ends_is_lost_and_followed_by_a_new_one(team: Team, etcd: Cluster) -> None:
    client = team.join(etcd.url, "ended/", ttl_s=1.5)
    team.connected(client, within_s=10.0)
    mine = team.cas(client, "ended/mine", 1, 0, leased=True)
    assert Etcd(Gateway(parse_addresses(etcd.url))).revoke(mine.lease)
    team.until(lambda: team.lost, "it is told")
    assert "the store has ended it" in team.lost[0]
    team.until(lambda: client.held_until_s > time.monotonic(), "a new lease")
    assert team.cas(client, "ended/mine", 2, 0, leased=True).lease != mine.lease


@needs_etcd
def test_a_bridge_that_is_killed_or_stuck_is_replaced(team: Team, etcd: Cluster) -> None:
    client = team.join(etcd.url, "bridge/", ttl_s=30.0)
    team.connected(client, within_s=10.0)
    mine = team.cas(client, "bridge/mine", 1, 0, leased=True)
    first = team.pid_of(0)
    for number in (signal.SIGKILL, signal.SIGSTOP):
        os.kill(team.pid_of(0), number)
        heard: list[Any] = []
        client.cas("bridge/other", 1, 0, then=heard.append)
        team.until(lambda heard=heard: heard, "it is told that the result is not known", 10.0)
        assert heard[0].may_have_happened
        team.connected(client, within_s=10.0)
    assert team.pid_of(0) != first
    assert client.snapshot()["bridge/mine"] == mine
    assert team.lost == []


@needs_etcd
def test_a_bridge_ends_when_its_host_agent_does(etcd: Cluster) -> None:
    bridge = Bridge(etcd.url, SECRET)
    sock = bridge()
    process = bridge._process
    assert process is not None
    time.sleep(0.3)
    assert process.poll() is None
    sock.close()
    assert process.wait(5) == 0
    bridge.close()


@needs_etcd
def test_foreign_values_below_the_prefix_are_named(team: Team, etcd: Cluster) -> None:
    gateway = Gateway(parse_addresses(etcd.url))
    gateway.call("/v3/kv/put", {"key": "Zm9yZWlnbi9h", "value": "bm8ganNvbg=="})  # foreign/a
    client = team.join(etcd.url, "foreign/")
    team.until(lambda: "no JSON and not ours" in client.disconnect_reason, "it says why", 10.0)
    assert "foreign/a" in client.disconnect_reason


# ---------------------------------------------------------------------------------------------------- members that fail


@needs_etcd
def test_an_etcd_that_is_killed_and_started_again_has_kept_everything(team: Team, tmp_path: Path) -> None:
    with cluster(tmp_path) as one:
        client = team.join(one.url, ttl_s=20.0)
        team.connected(client, within_s=10.0)
        mine = team.cas(client, "job/mine", 1, 0, leased=True)
        kept = team.cas(client, "job/kept", 1, 0)
        one.kill(0)
        team.until(lambda: not client.is_connected, "the client notices", 10.0)
        assert client.snapshot() == {"job/mine": mine, "job/kept": kept}
        team.until(lambda: "etcd does not answer" in client.disconnect_reason, "it says why", 10.0)
        one.start(0)
        team.connected(client, within_s=20.0)
        assert client.snapshot() == {"job/mine": mine, "job/kept": kept}
        assert team.cas(client, "job/kept", 2, kept.revision).value == 2
        assert team.lost == []


@needs_etcd
def test_one_of_three_members_is_killed_and_the_run_goes_on(
    team: Team, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with cluster(tmp_path, 3) as three:
        client, other = team.join(three.url), team.join(three.url)
        team.connected(client, other, within_s=15.0)
        team.cas(client, "job/mine", 1, 0, leased=True)
        words = []
        reached = 0
        for member in (0, 1, 2):  # one of them leads
            reached += 20
            team.count(client, "job/n", reached, 20.0)
            three.kill(member)
            reached += 30
            worst_s = team.count(client, "job/n", reached, 30.0)
            words.append(f"{worst_s * 1000:.0f} ms")
            team.until(lambda n=reached: other.snapshot()["job/n"].value >= n, "the other sees it", 15.0)
            three.start(member)
        assert "job/mine" in other.snapshot()
        assert team.lost == []
        with capsys.disabled():
            print(f"\n  longest time without a swap when member 0, 1, 2 was killed: {', '.join(words)}")


@needs_etcd
def test_without_a_majority_nothing_is_decided_and_the_lease_ends(team: Team, tmp_path: Path) -> None:
    with cluster(tmp_path, 3) as three:
        client = team.join(three.url, ttl_s=3.0)
        team.connected(client, within_s=15.0)
        mine = team.cas(client, "job/mine", 1, 0, leased=True)
        three.kill(1)
        three.kill(2)
        heard: list[Any] = []
        client.cas("job/mine", 2, mine.revision, then=heard.append)
        team.until(lambda: heard and not client.is_connected, "it is not connected", 15.0)
        assert heard[0].may_have_happened
        team.until(lambda: team.lost, "the lease ends by our own clock", 10.0)
        assert client.snapshot() == {"job/mine": mine}
        three.start(1, 2)
        team.connected(client, within_s=20.0)
        assert team.cas(client, "job/again", 1, 0, leased=True).value == 1


@needs_etcd
def test_a_member_that_is_stopped_is_passed_over(team: Team, tmp_path: Path) -> None:
    """It accepts connections and never answers; a watch at it is silent for ever."""
    with cluster(tmp_path, 3) as three:
        client, other = team.join(three.url), team.join(three.url)
        team.connected(client, other, within_s=15.0)
        team.cas(client, "job/mine", 1, 0, leased=True)
        three.processes[0].send_signal(signal.SIGSTOP)
        team.count(client, "job/n", 5, 30.0)
        team.until(lambda: other.is_connected and "job/n" in other.snapshot(), "the other sees it", 20.0)
        assert team.lost == []
        three.processes[0].send_signal(signal.SIGCONT)


# ------------------------------------------------------------------------------------------------------ TLS and login


def make_certificates(folder: Path) -> None:
    """A certificate authority, and a certificate of it for 127.0.0.1 that servers and clients can use.

    It has no common name: where certificates of clients have one, the JSON gateway of etcd refuses every request.
    """
    (folder / "names").write_text("subjectAltName=IP:127.0.0.1\nextendedKeyUsage=serverAuth,clientAuth\n")
    for command in (
        "req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=authority -keyout ca.key -out ca.crt",
        "req -newkey rsa:2048 -nodes -subj /O=members -keyout member.key -out member.csr",
        "x509 -req -in member.csr -CA ca.crt -CAkey ca.key -CAcreateserial -days 2 -extfile names -out member.crt",
    ):
        subprocess.run(["openssl", *command.split()], cwd=folder, check=True, capture_output=True)


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """An etcd that wants client certificates and a login. Tokens are valid for a second."""
    if shutil.which("openssl") is None:
        pytest.skip("needs openssl to make certificates")
    folder = tmp_path_factory.mktemp("guarded")
    make_certificates(folder)
    made = Cluster(folder, 1)
    here = f"https://127.0.0.1:{made.ports[0]}"
    made._options = {
        "listen-client-urls": here, "advertise-client-urls": here, "cert-file": folder / "member.crt",
        "key-file": folder / "member.key", "trusted-ca-file": folder / "ca.crt", "client-cert-auth": "true",
        "auth-token-ttl": 1, "listen-metrics-urls": f"http://127.0.0.1:{free_ports(1)[0]}",
    }  # fmt: skip
    made.wait_until_healthy = lambda member: time.sleep(1.0)  # type: ignore[method-assign]  (it would need the certificates)
    try:
        made.start(0)
        own = ("127.0.0.1", made.ports[0])
        root = EtcdAccess.from_env(
            certificates(made) | {"ETCDCTL_USER": "root:all of it"}, "etcds://x:1", is_own=True, creates_login_at=own
        )
        end_s = time.monotonic() + 20
        while True:
            try:
                Gateway(parse_addresses(made.url), root).call("/v3/kv/range", {"key": "YQ=="})
                break
            except Unreachable:
                assert time.monotonic() < end_s, (folder / "m0.log").read_text()
                time.sleep(0.2)
        yield made
    finally:
        made.close()


def certificates(made: Cluster) -> dict[str, str]:
    files = {"CACERT": "ca.crt", "CERT": "member.crt", "KEY": "member.key"}
    return {f"ETCDCTL_{name}": str(made.folder / file) for name, file in files.items()}


def access(made: Cluster, **env: str) -> EtcdAccess:
    return EtcdAccess.from_env(certificates(made) | env, "etcds://x:1")


@needs_etcd
def test_with_tls_and_a_login_it_keeps_its_promises(
    team: Team, guarded: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (certificates(guarded) | {"ETCDCTL_USER": "root:all of it"}).items():
        monkeypatch.setenv(name, value)
    url = guarded.url.replace("etcd://", "etcds://")
    one, two = team.join(url, "tls/"), team.join(url, "tls/")
    team.connected(one, two, within_s=15.0)
    revision = team.cas(one, "tls/a", 1, 0, leased=True).revision
    time.sleep(2.5)  # all tokens have expired
    team.cas(one, "tls/a", 2, revision, leased=True)
    team.until(lambda: "tls/a" in two.snapshot() and two.snapshot()["tls/a"].value == 2, "the other sees it", 15.0)
    assert team.lost == []


@needs_etcd
@pytest.mark.parametrize(
    ("env", "error", "words"),
    [
        ({}, LoginFailed, r"etcd wants a login .*ETCDCTL_USER=NAME:PASSWORD"),
        ({"ETCDCTL_USER": "root:wrong"}, LoginFailed, "does not accept the user 'root'"),
        ({"ETCDCTL_USER": "nobody", "ETCDCTL_PASSWORD": "x"}, LoginFailed, "does not accept the user 'nobody'"),
        ({"ETCDCTL_CACERT": "", "ETCDCTL_USER": "root:all of it"}, Unreachable, "certificate verify failed"),
        ({"ETCDCTL_CERT": "", "ETCDCTL_USER": "root:all of it"}, Unreachable, "etcd does not answer"),
    ],
)
def test_who_has_no_right_is_told_why(
    guarded: Cluster, env: dict[str, str], error: type[Exception], words: str
) -> None:
    gateway = Gateway(parse_addresses(guarded.url), access(guarded, **env))
    with pytest.raises(error, match=words):
        gateway.call("/v3/kv/range", {"key": "YQ=="})


@needs_etcd
def test_a_user_without_rights_is_refused_before_the_run_starts(
    guarded: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = Gateway(parse_addresses(guarded.url), access(guarded, ETCDCTL_USER="root:all of it"))
    root.call("/v3/auth/user/add", {"name": "guest", "password": "g"})
    url = guarded.url.replace("etcd://", "etcds://")
    for name, value in certificates(guarded).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("ETCDCTL_USER", "guest:g")
    with pytest.raises(LoginFailed, match=r"refuses to write .*permission denied"):
        check_etcd(Hosts(2, url, "ada", SECRET))
    monkeypatch.setenv("ETCDCTL_USER", "root:all of it")
    assert check_etcd(Hosts(2, url, "ada", SECRET)).startswith("the control store is an etcd with 1 member: none may")
    monkeypatch.delenv("ETCDCTL_CACERT")
    with pytest.raises(LoginFailed, match="ETCDCTL_CACERT names the authority"):
        check_etcd(Hosts(2, url, "ada", SECRET))


@needs_etcd
def test_threads_of_one_client_log_in_again_at_the_same_time(guarded: Cluster) -> None:
    gateway = Gateway(parse_addresses(guarded.url), access(guarded, ETCDCTL_USER="root:all of it"))
    for _ in range(3):
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda _: gateway.call("/v3/kv/range", {"key": "YQ=="}), range(24)))
        time.sleep(2.2)  # the token expires


@needs_etcd
def test_several_hosts_create_the_login_at_the_same_time(tmp_path: Path) -> None:
    with cluster(tmp_path) as one:
        root = EtcdAccess(user="root", password="from the secret", is_own=True)
        with pytest.raises(Unreachable, match="it has no login yet"):  # that could be the etcd of others
            Gateway(parse_addresses(one.url), root).call("/v3/kv/range", {"key": "YQ=="})
        Gateway(parse_addresses(one.url)).call("/v3/kv/range", {"key": "YQ=="})
        root = replace(root, creates_login_at=("127.0.0.1", one.ports[0]))
        with ThreadPoolExecutor(4) as pool:
            gateways = [Gateway(parse_addresses(one.url), root) for _ in range(4)]
            list(pool.map(lambda gateway: gateway.call("/v3/kv/range", {"key": "YQ=="}), gateways))
        with pytest.raises(LoginFailed, match="etcd wants a login"):
            Gateway(parse_addresses(one.url)).call("/v3/kv/range", {"key": "YQ=="})
        with pytest.raises(LoginFailed, match="does not accept the user 'root'"):
            other = replace(root, password="of another job")
            Gateway(parse_addresses(one.url), other).call("/v3/kv/range", {"key": "YQ=="})


@needs_etcd
def test_a_login_that_does_not_exist(etcd: Cluster) -> None:
    gateway = Gateway(parse_addresses(etcd.url), EtcdAccess(user="ada", password="x"))
    with pytest.raises(LoginFailed, match="ETCDCTL_USER is ada, but this etcd has no login: unset it"):
        gateway.call("/v3/kv/range", {"key": "YQ=="})


# ------------------------------------------------------------------------------------------------------ without an etcd


@pytest.mark.parametrize(
    ("where", "env", "words"),
    [
        (
            "etcd://a:1",
            {"ETCDCTL_CACERT": "x"},
            "ETCDCTL_CACERT is set, but etcd://a:1 is without TLS: write etcds://a",
        ),
        ("etcds://a:1", {"ETCDCTL_CACERT": "/no/where"}, "cannot be loaded: .*No such file.*ETCDCTL_CACERT=/no/where"),
    ],
)
def test_certificates_that_do_not_fit(where: str, env: dict[str, str], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        EtcdAccess.from_env(env, where)


def test_without_etcd_it_says_whom_it_asked(team: Team) -> None:
    ports = free_ports(2)
    client = team.join(f"etcd://127.0.0.1:{ports[0]},127.0.0.1:{ports[1]}")
    team.until(lambda: "etcd does not answer" in client.disconnect_reason, "it says why", 10.0)
    for port in ports:
        assert f"127.0.0.1:{port}: [Errno 111] Connection refused" in client.disconnect_reason
    with pytest.raises(Unreachable):
        Gateway([("127.0.0.1", ports[0])]).call("/v3/kv/range", {})


def test_endpoints_are_read_or_refused() -> None:
    assert parse_addresses("etcd://a:2379,b:1") == [("a", 2379), ("b", 1)]
    assert parse_addresses("10.0.0.1:2379") == [("10.0.0.1", 2379)]
    assert parse_addresses("etcd://[::1]:2379/") == [("::1", 2379)]
    for bad in ("", "etcd://", "a", "a:", ":1", "a:b", "a:0", "a:65536", "a:1,,b:2"):
        with pytest.raises(ValueError, match="is not HOST:PORT; write HOST:PORT or etcd://HOST:2379"):
            parse_addresses(bad)
