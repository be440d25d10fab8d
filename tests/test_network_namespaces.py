"""Hosts made on this machine, and `lockstep bench hosts` on them. Speed is not tested; the bytes on the links are."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from lockstep.bench.collectives import Case, Op
from lockstep.bench.hosts import GLOO, HIERARCHY, planned_bytes
from lockstep.bench.network_namespaces import INTERFACE, NamespaceError, VirtualHosts, check_requirements, sent_bytes
from lockstep.plan.profile import read_links

MIB = 2**20
START_S = 300.0  # for six processes that import torch, on a machine that has much else to do


def can_make_hosts() -> bool:
    try:
        with VirtualHosts(hosts=1, mbit=1000):
            return True
    except NamespaceError:
        return False


needs_root = pytest.mark.skipif(not can_make_hosts(), reason="needs root, ip and tc")


def bench(*arguments: str, what: str = "hosts") -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "lockstep.bench.command", what, *arguments]
    # A shell starts what is in the background with SIGINT ignored, and so would these be.
    heed = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=heed)


def record_of(what: str, folder: Path, *arguments: str) -> tuple[str, Any]:
    """The table that a benchmark prints, and what it writes to its JSON file; it must leave nothing behind."""
    before, found = holders(), folder / "found.json"
    process = bench(*arguments, "--json", str(found), what=what)
    table, progress = process.communicate(timeout=300)
    assert process.returncode == 0, progress
    wait_until_only(before)
    return table, json.loads(found.read_text())


def holders() -> set[int]:
    """Processes that hold a network namespace which is not ours."""
    found, ours = set(), os.readlink("/proc/self/ns/net")
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdecimal() and os.readlink(entry / "ns" / "net") != ours:
                found.add(int(entry.name))
        except OSError:
            continue
    return found


def wait_until_only(before: set[int]) -> None:
    end = time.monotonic() + 30
    while holders() - before and time.monotonic() < end:
        time.sleep(0.05)
    assert not holders() - before


def test_what_is_sent_by_plan():
    case = Case(Op.ALL_REDUCE, workers=4, size_bytes=25 * MIB)
    assert planned_bytes(case, GLOO, hosts=2) == 37.5 * MIB
    assert planned_bytes(case, HIERARCHY, hosts=2) == 25 * MIB
    assert planned_bytes(case, HIERARCHY, hosts=4) == 37.5 * MIB
    assert planned_bytes(Case(Op.BROADCAST, 4, MIB), HIERARCHY, hosts=2) == MIB


def test_says_what_is_missing(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda tool: None if tool == "tc" else tool)
    with pytest.raises(NamespaceError, match="need tc; install iproute2"):
        check_requirements()
    monkeypatch.setattr(shutil, "which", lambda tool: tool)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(NamespaceError, match="need root"):
        check_requirements()


@needs_root
def test_hosts_reach_each_other_over_links_that_count():
    before, listening, counted = holders(), threading.Event(), dict[str, int]()
    with VirtualHosts(hosts=3, mbit=1000) as virtual:

        def serve() -> None:
            virtual.hosts[2].enter()  # this thread only
            with socket.create_server((virtual.hosts[2].address, 5000)) as server:
                server.settimeout(10)
                listening.set()
                caller, _ = server.accept()
                with caller:
                    counted["received"] = sum(iter(lambda: len(caller.recv(MIB)), 0))

        def call() -> None:
            virtual.hosts[0].enter()
            with socket.create_connection((virtual.hosts[2].address, 5000), timeout=10) as link:
                start = sent_bytes()
                link.sendall(bytes(2 * MIB))
                link.shutdown(socket.SHUT_WR)
                link.recv(1)  # until all of it is there
                counted["sent"] = sent_bytes() - start

        server, caller = threading.Thread(target=serve), threading.Thread(target=call)
        server.start()
        assert listening.wait(10)
        caller.start()
        for thread in (server, caller):
            thread.join(20)
    assert counted["received"] == 2 * MIB
    assert 2 * MIB <= counted["sent"] < 2.1 * MIB
    wait_until_only(before)


@pytest.mark.slow
@needs_root
@pytest.mark.timeout(600)
def test_bench_exact_measures_sharded_steps_between_hosts(tmp_path):
    arms = ("exact@hierarchy", "exact-sharded@hierarchy")
    asked = ("--hosts", "2", "--backends", "hierarchy", "--models", "small", "--rounds", "2", "--steps", "2")
    table, record = record_of("exact", tmp_path, *asked, "--arms", "exact,exact-sharded")
    assert "2 hosts, links of 1000 Mbit/s" in table
    assert set(record["models"]["small"]) >= {"none", *arms}
    assert all(step_ms > 0 for arm in arms for step_ms in record["models"]["small"][arm])


@pytest.mark.slow
@needs_root
@pytest.mark.timeout(900)
def test_bench_hosts_counts_the_bytes_on_the_link(tmp_path):
    asked = ("--sizes", "4MiB", "--ops", "all-reduce,broadcast", "--rounds", "2")
    table, record = record_of("hosts", tmp_path, *asked)
    assert "by plan" in table
    all_reduce, broadcast = record["cases"]
    for arm, plan in (("gloo", 6 * MIB), ("hierarchy", 4 * MIB)):
        assert all_reduce["arms"][arm]["link_bytes"] == plan
        assert plan <= all_reduce["arms"][arm]["sent_bytes"] < 1.05 * plan
    assert 4 * MIB <= broadcast["arms"]["hierarchy"]["sent_bytes"] < 1.05 * 4 * MIB


@pytest.mark.slow
@needs_root
@pytest.mark.timeout(900)
def test_doctor_measures_links_between_hosts(tmp_path):
    """Started on each of two hosts, as docs/plan.md says; the one with rank 0 writes the file."""
    with VirtualHosts(hosts=2, mbit=1000) as virtual:
        rendezvous = f"{virtual.hosts[0].address}:29400"
        started = []
        for host in virtual.hosts:
            enter = ["nsenter", f"--net=/proc/{host.holder_pid}/ns/net", sys.executable, "-m", "lockstep", "doctor"]
            path = tmp_path / f"{host.number}.json"
            options = ["--links", str(path), "-n", "1", "--hosts", "2", "--rendezvous", rendezvous]
            env = os.environ | {"LOCKSTEP_HOST": f"host{host.number}", "GLOO_SOCKET_IFNAME": INTERFACE}
            started.append(subprocess.Popen([*enter, *options], env=env, stdout=subprocess.PIPE, text=True))
        outputs = [process.communicate(timeout=START_S)[0] for process in started]
    assert [process.returncode for process in started] == [0, 0]
    (written,) = tmp_path.iterdir()
    assert f"{written}: for `lockstep plan" in "".join(outputs)
    sums = {one.grad_comm: one for one in read_links(written)}
    assert {(one.backend, one.hosts, one.workers_per_host) for one in sums.values()} == {("hierarchy", 2, 1)}
    wire_s = 8 * 25 * MIB / 1e9
    assert wire_s < sums["fp32"].points[-1].seconds < 3 * wire_s
    assert sums["int4"].points[-1].seconds < sums["fp32"].points[-1].seconds


@pytest.mark.slow
@needs_root
@pytest.mark.timeout(900)
def test_bench_codecs_counts_the_bytes_of_compressed_gradients(tmp_path):
    table, record = record_of("codecs", tmp_path, "--mbit", "2000", "--models", "tiny", "--rounds", "2")
    assert "PowerSGD hook" in table
    arms, plain = record["all-reduce"], record["all-reduce"]["Gloo"]["sent_bytes"]
    # Of 32 bits: those of an element and of its sum, half of each, and a byte for 64 elements twice.
    for arm, bits, error in (("int8", 8.0, 0.03), ("int4", (4 + 5) / 2, 0.4)):
        assert bits < 32 * arms[arm]["sent_bytes"] / plain < 1.05 * (bits + 2 * 8 / 64)
        assert 0.001 < arms[arm]["error"] < error
    assert set(record["tiny"]) >= {"torch DDP", "Run", "Run, int8", "Run, int4"}


@pytest.mark.slow
@needs_root
@pytest.mark.timeout(900)
def test_bench_tuner_names_what_was_chosen(tmp_path):
    table, record = record_of("tuner", tmp_path, "--models", "tiny", "--links", "100,shm")
    assert "chosen" in table
    choices = [one["choice"] for one in record["results"] if one["arm"] == "auto"]
    assert len(choices) == 2
    assert set(choices) <= {"fp32", "int8", "int4"}


@pytest.mark.slow
@needs_root
@pytest.mark.timeout(900)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_nothing_is_left_of_a_run_that_is_ended(number):
    before = holders()
    process = bench("--quick", "--rounds", "1000")
    try:
        end = time.monotonic() + START_S
        while len(holders() - before) < 5:  # three namespaces are held, and workers have entered theirs
            assert time.monotonic() < end, f"not under way after {START_S} s"
            time.sleep(0.05)
        process.send_signal(number)
        process.communicate(timeout=300)
        assert process.returncode == (130 if number == signal.SIGINT else -number)
    finally:
        process.kill()
    wait_until_only(before)
