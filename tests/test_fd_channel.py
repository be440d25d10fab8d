"""Descriptor channels: descriptors are received in the order in which they were sent, or not at all."""

import os

import pytest

from lockstep.data.packed_batch import FdChannel, receive_fd


@pytest.fixture
def channel():
    made = FdChannel()
    yield made
    made.close()


def memory(text: bytes) -> int:
    handle = os.memfd_create("test")
    os.write(handle, text)
    return handle


def send(channel: FdChannel, text: bytes) -> int:
    handle = memory(text)
    label = channel.send(handle)
    os.close(handle)
    return label


def read(handle: int) -> bytes:
    found = os.pread(handle, 100, 0)
    os.close(handle)
    return found


def test_descriptors_are_received_in_order(channel):
    labels = [send(channel, text) for text in (b"one", b"two", b"three")]
    assert [read(receive_fd(channel.number, label)) for label in labels] == [b"one", b"two", b"three"]


def test_a_descriptor_is_received_from_another_process(channel):
    child = os.fork()
    if child == 0:
        send(channel, b"from a child")
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert read(receive_fd(channel.number, 1)) == b"from a child"


def test_descriptors_of_a_batch_that_was_never_sent_are_closed(channel):
    before = len(os.listdir("/proc/self/fd"))
    send(channel, b"of a batch that could not be pickled")
    label = send(channel, b"of the next one")
    assert read(receive_fd(channel.number, label)) == b"of the next one"
    assert len(os.listdir("/proc/self/fd")) == before


def test_memory_that_is_missing_is_an_error(channel):
    label = send(channel, b"one")
    send(channel, b"two")
    assert read(receive_fd(channel.number, label)) == b"one"
    with pytest.raises(ConnectionError, match="memory 1 of a loader process is missing, and 2 came"):
        receive_fd(channel.number, label)


def test_closing_leaves_nothing_open():
    before = len(os.listdir("/proc/self/fd"))
    channel = FdChannel()
    send(channel, b"never received")
    channel.close()
    assert len(os.listdir("/proc/self/fd")) == before
