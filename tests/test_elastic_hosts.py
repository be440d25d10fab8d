"""Runs on several hosts: network namespaces of this machine, with a host agent and real workers in each.

They need root and iproute2, and are skipped without. What can be tried without a network, or over the loopback, is here
too. chaos/training_hosts.py has the same hosts, and many more cuts.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from lockstep.bench import network_namespaces
from lockstep.errors import LockstepError
from lockstep.launcher.hosts import (
    SAY_AFTER_S,
    HostContact,
    Hosts,
    check_rendezvous,
    display_name,
    interface_to,
    key_prefix,
    make_host_name,
    name_workers,
    wait_for_address,
    workers_on_host,
)
from lockstep.launcher.job import Job, worker_env
from test_etcd import make_certificates
from test_launch import split_card

CHAOS = Path(__file__).resolve().parent.parent / "chaos"
sys.path.append(str(CHAOS))
from training_hosts import Cut, Fleet, hosts, reference  # noqa: E402
from training_life import is_alive  # noqa: E402

STEPS = 200
PACE_S = 0.2  # between steps, until the end: they are not to run out before
LEASE_S = 1.5
LAUNCHER = (sys.executable, "-m", "lockstep", "run")
SECRET = secrets.token_hex(32)


def why_not() -> str:
    try:
        network_namespaces.check_requirements()
        with hosts(1):
            return ""
    except network_namespaces.NamespaceError as error:
        return str(error)


WHY_NOT = why_not()
needs_hosts = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)
ETCD = os.environ.get("ETCD") or shutil.which("etcd")
needs_etcd = pytest.mark.skipif(ETCD is None, reason="no etcd on PATH or in $ETCD; `apt-get install etcd-server`")


@pytest.fixture(scope="module")
def undisturbed() -> str:
    """What a world of one computes."""
    return reference(STEPS)


class Stage:
    """Hosts that end with the test, and so does what runs on them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._made: list[Any] = []

    def fleet(self, count: int, workers: int, *options: str) -> Fleet:
        rig_ = hosts(count)
        made = rig_.__enter__()
        fleet = Fleet(self._folder, made, workers, "--lease-s", str(LEASE_S), *options, steps=STEPS)
        fleet.pace(PACE_S)
        self._made += [fleet, rig_]
        return fleet

    def close(self) -> None:
        for one in self._made:
            one.__exit__(None, None, None)


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    made = Stage(tmp_path)
    yield made
    made.close()


def check(fleet: Fleet, undisturbed: str, *names: str) -> None:
    """It ends well, on these hosts or on all, and nothing of what happened can be seen in what was computed."""
    fleet.pace(0.0)
    statuses = fleet.await_end(*names)
    assert set(statuses.values()) == {0}, fleet.outputs()
    assert fleet.digests() == {undisturbed}
    assert fleet.ledger() == ""
    assert fleet.two_sides() == ""


# ---- real hosts ------------------------------------------------------------------------------------------------------


@needs_hosts
@pytest.mark.slow
@pytest.mark.parametrize(("count", "workers"), [(2, 2), (3, 1)])
def test_any_number_of_hosts_computes_what_one_worker_does(
    stage: Stage, undisturbed: str, count: int, workers: int
) -> None:
    fleet = stage.fleet(count, workers)
    fleet.start()
    fleet.await_members(count * workers)
    check(fleet, undisturbed)
    assert "workers over hierarchy" in fleet.output("ada")
    assert len(list((fleet.folder / "ends").iterdir())) == count * workers
    assert [event["event"] for event in fleet.events("bob")].count("generation") == 1  # no other was formed


@pytest.mark.slow
@needs_hosts
def test_a_worker_that_is_killed_on_another_host_is_replaced_there(stage: Stage, undisturbed: str) -> None:
    fleet = stage.fleet(2, 2, "--min", "1")
    fleet.start()
    fleet.await_members(4)
    fleet.await_step(5)
    victim, pid = next(iter(fleet.pids("bob").items()))
    os.kill(pid, signal.SIGKILL)
    fleet.await_(lambda: victim not in fleet.members(), "the others to go on")
    fleet.await_members(4)
    assert victim not in fleet.members()
    check(fleet, undisturbed)
    assert "worker 0 on bob was lost" in fleet.output("ada")


@pytest.mark.slow
@needs_hosts
def test_the_others_go_on_when_a_host_is_killed(stage: Stage, undisturbed: str) -> None:
    fleet = stage.fleet(3, 1, "--min", "2")
    fleet.start()
    fleet.await_members(3)
    fleet.await_step(5)
    pids = fleet.pids("cyd")
    fleet.kill("cyd")
    fleet.await_members(2)
    assert not any(is_alive(pid) for pid in pids.values())
    check(fleet, undisturbed, "ada", "bob")
    assert "host cyd is lost" in fleet.output("ada")
    assert "worker 0 on cyd was lost; 2 workers continue" in fleet.output("bob")


@pytest.mark.slow
@needs_hosts
def test_a_host_that_was_cut_off_comes_back_with_other_workers(stage: Stage, undisturbed: str) -> None:
    fleet = stage.fleet(3, 1, "--min", "1")
    fleet.start()
    fleet.await_members(3)
    fleet.await_step(5)
    pids = fleet.pids("bob")
    cut = Cut("link", 1, 0, for_s=0, after_s=0)
    cut.make(fleet.hosts)
    fleet.await_(lambda: fleet.pids("bob") == {}, "the workers of bob to stop")
    assert not any(is_alive(pid) for pid in pids.values())
    fleet.await_members(2)
    reached = fleet.steps()
    fleet.await_step(reached + 3)
    cut.heal(fleet.hosts)
    fleet.await_members(3)
    check(fleet, undisturbed)
    assert "our lease at the control store has ended" in fleet.output("bob")
    assert "host bob is lost" in fleet.output("ada")
    assert "worker 1 on bob joins" in fleet.output("cyd")


@pytest.mark.slow
@needs_hosts
def test_of_two_hosts_that_do_not_reach_each_other_one_is_left_out(stage: Stage, undisturbed: str) -> None:
    fleet = stage.fleet(3, 1, "--min", "1", "--stuck-s", "4")
    fleet.start()
    fleet.await_members(3)
    fleet.await_step(5)
    cut = Cut("lost", 2, 1, for_s=0, after_s=0)  # both still reach ada, who keeps the store
    cut.make(fleet.hosts)
    fleet.await_members(2)
    reached = fleet.steps()
    fleet.await_step(reached + 3)
    cut.heal(fleet.hosts)
    fleet.await_members(3)
    check(fleet, undisturbed)
    assert "host cyd is left out: it and bob do not reach each other" in fleet.output("ada")
    assert "host cyd is not left out any more" in fleet.output("ada")


@pytest.mark.slow
@needs_hosts
def test_a_cut_that_is_shorter_than_a_lease_costs_no_worker(stage: Stage, undisturbed: str) -> None:
    fleet = stage.fleet(2, 1)
    fleet.start()
    fleet.await_members(2)
    fleet.await_step(5)
    cut = Cut("lost", 1, 0, for_s=0, after_s=0)
    cut.make(fleet.hosts)
    time.sleep(LEASE_S / 4)
    cut.heal(fleet.hosts)
    check(fleet, undisturbed)
    assert "was lost" not in fleet.outputs()


@pytest.mark.slow
@needs_hosts
def test_when_the_store_is_lost_for_good_the_others_end(stage: Stage) -> None:
    fleet = stage.fleet(2, 1, "--min", "1", "--give-up-s", "3")
    fleet.start()
    fleet.await_members(2)
    fleet.await_step(3)
    fleet.kill("ada")
    assert fleet.await_end("bob") == {"bob": 1}
    said = fleet.output("bob")
    assert "our lease at the control store has ended" in said
    lines, card = split_card(said)
    assert lines[-1].startswith("lockstep: gave up without the control store")
    assert f"{fleet.where}" in lines[-1]
    assert "| what   gave up without the control store" in card


@pytest.mark.slow
@needs_hosts
def test_a_host_that_begins_before_the_store_is_there_waits_for_it(stage: Stage, undisturbed: str) -> None:
    fleet = stage.fleet(2, 1)
    fleet.start("bob")
    fleet.await_(lambda: "waiting for the control store" in fleet.output("bob"), "a word about it")
    assert fleet.pids("bob") == {}  # no worker is started for nothing
    fleet.start("ada")
    fleet.await_members(2)
    check(fleet, undisturbed)
    assert f"the control store at {fleet.where} can be reached" in fleet.output("bob")


@needs_hosts
def test_a_store_that_cannot_be_reached_is_given_up(stage: Stage) -> None:
    fleet = stage.fleet(2, 1, "--give-up-s", "2")
    fleet.start("bob")
    assert fleet.await_end("bob") == {"bob": 1}
    assert "waiting for the control store" in fleet.output("bob")
    assert "gave up without the control store" in fleet.output("bob")


@pytest.mark.slow
@needs_hosts
def test_another_secret_is_refused(stage: Stage) -> None:
    fleet = stage.fleet(2, 1, "--give-up-s", "4")
    fleet.start("ada")
    fleet.start("bob", LOCKSTEP_JOB_SECRET=secrets.token_hex(32))
    assert fleet.await_end("bob") == {"bob": 1}
    assert "the secrets may differ" in fleet.output("bob")
    assert "bob" not in fleet.output("ada")
    assert fleet.processes["ada"].poll() is None  # it waits for the right one


@pytest.mark.slow
@needs_hosts
def test_a_program_that_is_given_up_on_one_host_ends_on_all_and_they_know_why(stage: Stage) -> None:
    fleet = stage.fleet(3, 1, "--min", "1")
    script = fleet.folder / "fails.py"
    script.write_text(
        "import os, torch, lockstep\n"
        "from torch import nn\n"
        "data = torch.utils.data.TensorDataset(torch.zeros(40, 2))\n"
        "def loss(model, batch):\n"
        "    if run.world.size == 3 and os.environ['LOCKSTEP_HOST'].startswith('bob'):\n"
        "        raise KeyError('no such thing')\n"
        "    return model(batch[0]).sum(), len(batch[0])\n"
        "with lockstep.Run(seed=1, progress=False) as run:\n"
        "    model = run.replicate(nn.Linear(2, 1))\n"
        "    batches = run.batches(data, global_batch_size=4, shards=4, epochs=None)\n"
        "    for batch in run.train(batches, torch.optim.SGD(model.parameters(), lr=0.1), steps=10**6):\n"
        "        run.step(loss, batch)\n"
    )
    fleet.program = (str(script),)
    fleet.start()
    statuses = fleet.await_end()
    assert statuses == {"ada": 1, "bob": 1, "cyd": 1}, fleet.outputs()
    lines, card = split_card(fleet.output("bob"))
    assert "KeyError: 'no such thing'" in lines[-1]
    assert "raise KeyError('no such thing')" in card
    for name in ("ada", "cyd"):
        last = split_card(fleet.output(name))[0][-1]
        assert re.search(r"worker \d on bob failed, exit status 1: KeyError: 'no such thing'; given up there", last)


@pytest.mark.slow
@needs_hosts
def test_scaling_from_any_host_is_shared_out_evenly(stage: Stage, undisturbed: str) -> None:
    fleet = stage.fleet(2, 2, "--min", "1", "--max", "6")
    fleet.start()
    fleet.await_members(4)

    def scale(name: str, workers: int) -> None:
        command = [sys.executable, "-m", "lockstep", "scale", str(fleet.folder / "logs" / name), str(workers)]
        assert subprocess.run(command, timeout=300).returncode == 0

    def by_host() -> dict[str, int]:
        members = [display_name(member.rpartition(".")[0]) for member in fleet.members()]
        return {name: members.count(name) for name in fleet.names}

    scale("bob", 3)
    fleet.await_(lambda: by_host() == {"ada": 2, "bob": 1}, "three workers")
    scale("ada", 6)
    fleet.await_(lambda: by_host() == {"ada": 3, "bob": 3}, "six workers")
    check(fleet, undisturbed)


@pytest.mark.slow
@needs_hosts
def test_hosts_that_were_started_differently_are_refused(stage: Stage) -> None:
    fleet = stage.fleet(2, 1)
    fleet.start("ada")
    fleet.await_(lambda: fleet.pids("ada"), "ada to begin")
    fleet.workers = 2
    fleet.start("bob")
    assert fleet.await_end("bob") == {"bob": 2}
    assert "this host has --hosts 2 -n 2" in fleet.output("bob")
    assert "the first one has --hosts 2 -n 1" in fleet.output("bob")


@pytest.mark.slow
@needs_hosts
def test_a_host_that_comes_when_all_is_done_ends_in_peace(stage: Stage, undisturbed: str) -> None:
    """Its workers are on their way when the program ends for the others."""
    fleet = stage.fleet(2, 1, "--min", "1")
    fleet.pace(0.0)
    fleet.start("ada")
    fleet.await_step(STEPS // 2)
    fleet.pace(PACE_S)
    fleet.start("bob")
    fleet.await_(lambda: "bob can be seen" in fleet.output("ada"), "bob")
    check(fleet, undisturbed)


@pytest.mark.slow
@needs_hosts
def test_sigterm_on_one_host_saves_and_ends_all_of_them(stage: Stage) -> None:
    fleet = stage.fleet(2, 1)
    fleet.start()
    fleet.await_members(2)
    fleet.await_step(5)
    fleet.processes["bob"].send_signal(signal.SIGTERM)
    assert fleet.await_end() == {"ada": 75, "bob": 75}, fleet.outputs()


@pytest.mark.slow
@needs_hosts
def test_a_host_is_drained_and_the_other_takes_over(stage: Stage, undisturbed: str) -> None:
    fleet = stage.fleet(2, 1, "--min", "1")
    fleet.start()
    fleet.await_members(2)
    fleet.await_step(5)
    drain = [sys.executable, "-m", "lockstep", "drain"]
    subprocess.run([*drain, str(fleet.folder / "logs" / "ada")], check=True, timeout=60)
    fleet.await_(lambda: "this host keeps the control store" in fleet.output("ada"), "the refusal")
    subprocess.run([*drain, str(fleet.folder / "logs" / "bob")], check=True, timeout=60)
    assert fleet.await_end("bob") == {"bob": 0}, fleet.outputs()
    fleet.await_(lambda: "2 workers continue" in fleet.output("ada"), "two workers of ada")
    check(fleet, undisturbed, "ada")
    assert "was lost" not in fleet.output("ada") + fleet.output("bob")


@needs_etcd
def test_with_an_etcd_no_host_is_special(tmp_path: Path, undisturbed: str) -> None:
    """Over the loopback. The host agent that came first is killed, and started again with the same secret."""
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as other:
        port, peer = one.getsockname()[1], other.getsockname()[1]
    here, there = f"http://127.0.0.1:{port}", f"http://127.0.0.1:{peer}"
    assert ETCD is not None
    etcd = subprocess.Popen(
        [ETCD, "--data-dir", str(tmp_path / "etcd"), "--listen-client-urls", here, "--advertise-client-urls", here,
         "--listen-peer-urls", there, "--initial-advertise-peer-urls", there, "--initial-cluster", f"default={there}"],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        for again in range(2):  # what the first run has left in the etcd does not disturb the second
            folder = tmp_path / f"run{again}"
            fleet = Fleet(folder, Loopbacks.of(2), 1, "--min", "1", "--lease-s", "2", "--store",
                          f"etcd://127.0.0.1:{port}", steps=STEPS)  # fmt: skip
            fleet.secret = SECRET
            fleet.pace(PACE_S)
            with fleet:
                fleet.start()
                fleet.await_members(2)
                if again == 0:
                    fleet.await_step(5)
                    fleet.kill("ada")
                    fleet.await_members(1, "bob")
                    fleet.start("ada")
                    fleet.await_members(2, "bob")
                check(fleet, undisturbed)
    finally:
        etcd.kill()
        etcd.wait()


@needs_etcd
@needs_hosts
@pytest.mark.parametrize("lost", ["ada", "bob", "cyd"])
@pytest.mark.few(1)
def test_three_hosts_with_an_etcd_of_their_own_continue_without_any_of_them(
    stage: Stage, undisturbed: str, lost: str
) -> None:
    """A host is lost with all that runs on it: its host agent, its workers and its member of the etcd.

    One of them comes back, with the data of its member; and once more, without.
    """
    fleet = stage.fleet(3, 1, "--min", "1", "--store", "", "--start-etcd")
    store = "etcd://" + ",".join(f"{host.address}:2379" for host in fleet.hosts)
    fleet.options = tuple(store if option == "" else option for option in fleet.options)
    fleet.start()
    others = [name for name in fleet.names if name != lost]
    fleet.await_members(3, others[0])
    fleet.await_step(5)
    fleet.kill(lost)
    fleet.await_members(2, others[0])
    if lost == "bob":
        fleet.start(lost)
        fleet.await_members(3, others[0])
        fleet.kill(lost)
        fleet.await_members(2, others[0])
        shutil.rmtree(fleet.folder / "logs" / lost / "etcd")
        fleet.start(lost)
        fleet.await_members(3, others[0])
        assert "it was one, and its data is gone" in fleet.output(lost)
        others = list(fleet.names)
    check(fleet, undisturbed, *others)
    assert not processes_named("etcd")


@needs_etcd
@needs_hosts
def test_a_host_that_the_store_does_not_name_takes_no_etcd_of_others(stage: Stage) -> None:
    fleet = stage.fleet(1, 1, "--give-up-s", "3", "--store", "etcd://10.255.255.1:2379", "--start-etcd")
    fleet.start()
    assert fleet.await_end() == {"ada": 1}
    assert "no address in etcd://10.255.255.1:2379 is one of this host" in fleet.output("ada")


@needs_etcd
@pytest.mark.slow
@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl to make certificates")
def test_an_etcd_of_their_own_with_certificates(tmp_path: Path, undisturbed: str) -> None:
    """Over the loopback, with one member."""
    make_certificates(tmp_path)
    crt, key, authority = (str(tmp_path / name) for name in ("member.crt", "member.key", "ca.crt"))
    certificates = {
        "ETCDCTL_CACERT": authority, "ETCDCTL_CERT": crt, "ETCDCTL_KEY": key,
        "ETCD_CERT_FILE": crt, "ETCD_KEY_FILE": key, "ETCD_TRUSTED_CA_FILE": authority, "ETCD_CLIENT_CERT_AUTH": "true",
        "ETCD_PEER_CERT_FILE": crt, "ETCD_PEER_KEY_FILE": key, "ETCD_PEER_TRUSTED_CA_FILE": authority,
        "ETCD_PEER_CLIENT_CERT_AUTH": "true",
    }  # fmt: skip
    with socket.create_server(("127.0.0.1", 0)) as one:
        port = one.getsockname()[1]
    store = f"etcds://127.0.0.1:{port}"
    with Fleet(
        tmp_path / "run", Loopbacks.of(1), 2, "--min", "1", "--store", store, "--start-etcd", steps=STEPS
    ) as fleet:
        fleet.start(**certificates)
        fleet.await_members(2)
        workers = fleet.pids("ada")
        for pid in workers.values():
            assert b"ETCDCTL_" not in Path(f"/proc/{pid}/environ").read_bytes()
        check(fleet, undisturbed)
    assert not processes_named("etcd")


def processes_named(name: str) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        with suppress(OSError):
            if entry.name.isdecimal() and (entry / "comm").read_text().strip() == name:
                found.append(int(entry.name))
    return found


class Loopbacks:
    """Hosts that are not: all of them are this machine."""

    @staticmethod
    def of(count: int) -> tuple[network_namespaces.NamespaceHost, ...]:
        return tuple(network_namespaces.NamespaceHost(number, "127.0.0.1", os.getpid()) for number in range(count))


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="nsenter needs root")
def test_two_host_agents_may_share_a_machine(tmp_path: Path, undisturbed: str) -> None:
    with Fleet(tmp_path, Loopbacks.of(2), 1, steps=STEPS) as fleet:
        fleet.start()
        check(fleet, undisturbed)
    assert "2 workers over hierarchy" in fleet.outputs()


# ---- the command line ------------------------------------------------------------------------------------------------


@pytest.mark.few(6)
@pytest.mark.parametrize(
    ("options", "env", "words"),
    [
        (("--hosts", "2"), {}, "where do they meet?"),
        (("--hosts", "2", "--rendezvous", "10.0.0.1:29400"), {}, "LOCKSTEP_JOB_SECRET is not set"),
        (("--hosts", "2", "--rendezvous", "10.0.0.1:29400"), {}, "secrets.token_hex"),
        (("--hosts", "2", "--rendezvous", "10.0.0.1:29400"), {"LOCKSTEP_JOB_SECRET": "ab"}, "64 hexadecimal digits"),
        (("--hosts", "2", "--rendezvous", "nowhere"), {"LOCKSTEP_JOB_SECRET": SECRET}, "is not HOST:PORT"),
        (("--hosts", "2", "--rendezvous", "a:1,b:2"), {"LOCKSTEP_JOB_SECRET": SECRET}, "only one can keep the store"),
        (("--rendezvous", "10.0.0.1:29400"), {"LOCKSTEP_JOB_SECRET": SECRET}, "how many hosts"),
        (("--hosts", "2", "--store", "redis://x:1"), {"LOCKSTEP_JOB_SECRET": SECRET}, "it takes etcd://"),
        (("--hosts", "2", "--rendezvous", "x:1", "--start-etcd"), {}, "which hosts run it? Give --store etcd://"),
        (("--hosts", "2", "--store", "etcd://x:1,y:1", "--start-etcd"), {}, "names 2 members"),
        (
            ("--hosts", "2", "--store", "etcds://x:1", "--start-etcd"),
            {},
            "for that etcd needs ETCD_CERT_FILE, ETCD_KEY",
        ),
        (
            ("--hosts", "2", "--store", "etcd://x:1", "--rendezvous", "x:2"),
            {"LOCKSTEP_JOB_SECRET": SECRET},
            "leave one",
        ),
        (("--hosts", "0"), {}, "is not a number of hosts"),
        (
            ("--hosts", "2", "--rendezvous", "10.0.0.1:1", "--lease-s", "60"),
            {"LOCKSTEP_JOB_SECRET": SECRET},
            "--lease-s 60 must be 0.5 to 15",
        ),
        (
            ("--hosts", "2", "-n", "2", "--rendezvous", "10.0.0.1:1", "--min", "5"),
            {"LOCKSTEP_JOB_SECRET": SECRET},
            "--hosts 2 times -n 2 must be at least --min (5)",
        ),
    ],
)
def test_what_makes_no_sense_is_refused(
    tmp_path: Path, options: tuple[str, ...], env: dict[str, str], words: str
) -> None:
    script = tmp_path / "train.py"
    script.touch()
    outer = {name: value for name, value in os.environ.items() if name != "LOCKSTEP_JOB_SECRET"}
    command = [*LAUNCHER, *options, str(script)]
    done = subprocess.run(command, capture_output=True, text=True, env=outer | env, cwd=tmp_path, timeout=300)
    assert done.returncode == 2
    assert words in done.stderr
    assert not (tmp_path / "lockstep-logs").exists()


# ---- parts -----------------------------------------------------------------------------------------------------------


def some_hosts(**more: Any) -> Hosts:
    return Hosts(**({"count": 3, "where": "10.77.0.1:29400", "name": "bob-0a1b2c", "secret": b"s" * 32} | more))


@pytest.mark.parametrize(
    ("total", "many", "shares"), [(6, 3, [2, 2, 2]), (5, 3, [2, 2, 1]), (1, 3, [1, 0, 0]), (7, 2, [4, 3]), (3, 1, [3])]
)
def test_shares_are_even_and_the_first_have_the_rest(total: int, many: int, shares: list[int]) -> None:
    assert [workers_on_host(total, many, number) for number in range(many)] == shares
    assert workers_on_host(total, many, many) == 0  # one that takes the place of a host that is not gone yet


def test_names_are_never_used_again_and_people_read_the_old_ones() -> None:
    first, second = (make_host_name("rack 7/node.3") for _ in range(2))
    assert first != second
    assert display_name(first) == display_name(second) == "rack-7-node-3"
    assert display_name(make_host_name("...")) == "host"
    assert display_name(make_host_name(None)) == socket.gethostname().partition(".")[0]
    named = name_workers(f"{first}.0 and {second}.12 join")
    assert named == "worker 0 on rack-7-node-3 and worker 12 on rack-7-node-3 join"
    assert name_workers("1.5 and 10.77.0.1 stay") == "1.5 and 10.77.0.1 stay"


def test_jobs_with_different_secrets_do_not_meet() -> None:
    assert key_prefix(b"a" * 32) != key_prefix(b"b" * 32)
    assert key_prefix(b"a" * 32) == key_prefix(b"a" * 32)
    assert "aaaa" not in key_prefix(b"a" * 32)


def test_the_network_that_leads_to_the_rendezvous_is_found() -> None:
    assert interface_to("127.0.0.1:1") == "lo"
    assert interface_to("unknown.invalid:1") is None
    route = Path("/proc/net/route").read_text().splitlines()[1:]
    default = [line.split()[0] for line in route if line.split()[1] == "00000000"]
    if default:
        assert interface_to("198.51.100.7:1") == default[0]


def test_what_workers_are_told_of_hosts(tmp_path: Path) -> None:
    job = Job(("train.py",), 2, tmp_path, hosts=some_hosts(where="127.0.0.1:1"))
    base = {"LOCKSTEP_HOST": "bob", "LOCKSTEP_JOB_SECRET": SECRET, "RANK": "7", "MASTER_ADDR": "x", "HOME": "/h"}
    env = worker_env(base, rank=1, job=job, port=1, cores=4)
    assert (env["LOCKSTEP_HOST"], env["GLOO_SOCKET_IFNAME"]) == ("bob-0a1b2c", "lo")
    assert (env["LOCAL_RANK"], env["OMP_NUM_THREADS"], env["HOME"]) == ("1", "2", "/h")
    assert not {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCKSTEP_JOB_SECRET"} & env.keys()
    chosen = worker_env(base | {"GLOO_SOCKET_IFNAME": "ib0"}, rank=1, job=job, port=1, cores=4)
    assert chosen["GLOO_SOCKET_IFNAME"] == "ib0"


def test_a_secret_is_not_shown() -> None:
    assert "ssss" not in repr(some_hosts())


def test_what_is_said_about_the_store() -> None:
    contact = HostContact(some_hosts(give_up_s=60.0))
    assert contact.update_store(100.0, trouble="no answer") == []  # perhaps in a moment
    (line,) = contact.update_store(100.0 + SAY_AFTER_S, trouble="no answer")
    assert line == "waiting for the control store: no answer; giving up in 59 s"
    assert contact.update_store(105.0, trouble="no answer") == []
    assert not contact.should_give_up(159.0)
    assert contact.should_give_up(160.0)
    assert contact.update_store(161.0, trouble="") == ["the control store at 10.77.0.1:29400 can be reached"]
    assert not contact.should_give_up(999.0)
    contact.update_store(200.0, trouble="it hung up")
    (line,) = contact.update_store(202.0, trouble="it hung up")
    assert line == "the control store cannot be reached: it hung up; giving up in 58 s"
    assert contact.update_store(202.1, trouble="") != []
    assert contact.update_store(202.2, trouble="") == []


def test_what_is_said_about_other_hosts() -> None:
    contact = HostContact(some_hosts())
    ada, cyd = "ada-000000", "cyd-000001"
    assert contact.update_hosts([ada, cyd], []) == ["ada and cyd can be seen: 3 of 3 hosts"]
    assert contact.update_hosts([ada, cyd], []) == []
    assert contact.update_hosts([ada], []) == ["host cyd is lost: nothing was heard from it for 5 s"]
    assert contact.update_hosts([ada, "cyd-000002"], []) == ["cyd can be seen: 3 of 3 hosts"]
    assert contact.update_hosts([], [ada, "cyd-000002"]) == []  # they left when it was time
    assert contact.seen == {ada, cyd, "cyd-000002"}


def test_a_rendezvous_without_an_address_is_waited_for_and_given_up() -> None:
    said: list[str] = []
    with pytest.raises(LockstepError, match=r"'unknown\.invalid' has no address .*; gave up after 0\.3 s"):
        wait_for_address(some_hosts(where="unknown.invalid:1", give_up_s=0.3), said.append)
    assert len(said) == 1
    assert "waiting until it has, at most 0.3 s" in said[0]
    wait_for_address(some_hosts(where="127.0.0.1:1"), said.append)
    assert len(said) == 1


def test_where_hosts_can_meet() -> None:
    assert check_rendezvous("[::1]:29400") == [("::1", 29400)]
    assert len(check_rendezvous("etcd://a:2379,b:2379")) == 2
    with pytest.raises(ValueError, match="only one can keep the store"):
        check_rendezvous("a:1,b:2")
