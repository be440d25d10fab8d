"""Costs of collectives: published figures from their own inputs, the limits of the functions, and links as text."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import pytest

from lockstep.plan.collective_cost import (
    all_gather,
    broadcast,
    flat_ring_all_reduce,
    halving_doubling_all_reduce,
    hierarchical_all_reduce,
    reduce_scatter,
    ring_all_reduce,
    sent_bytes_per_host,
    tree_all_reduce,
)
from lockstep.plan.links import PRESETS, Link, parse_link
from lockstep.plan.profile import SumPoint
from lockstep.plan.sum_cost import overlap

KIB, MIB, GIB = 2**10, 2**20, 2**30
ALL_REDUCES = (ring_all_reduce, tree_all_reduce, halving_doubling_all_reduce)
COLLECTIVES = (*ALL_REDUCES, reduce_scatter, all_gather, broadcast)


def wire(gb_per_s: float) -> Link:
    """A link without latency."""
    return Link("wire", latency_s=0.0, bytes_per_s=gb_per_s * 1e9)


def steps(us: float) -> Link:
    """A link with latency only, as far as a float can tell."""
    return Link("steps", latency_s=us * 1e-6, bytes_per_s=1e300)


def bus_gb_per_s(size_bytes: float, workers: int, time_s: float) -> float:
    return size_bytes / time_s * 2 * (workers - 1) / workers / 1e9


# ---- costs and their definitions in the literature -------------------------------------------------------------------


@pytest.mark.parametrize("workers", [2, 3, 8, 24, 1024])
def test_bus_bandwidth_is_the_rate_of_the_link_whatever_the_number_of_workers(workers: int) -> None:
    # nccl-tests, doc/PERFORMANCE.md: the factor from algorithm to bus bandwidth is 2(n-1)/n for all-reduce, (n-1)/n for
    # reduce-scatter and all-gather, 1 for broadcast; the result is the rate of the hardware.
    link, size = wire(50), 1e9
    share = (workers - 1) / workers
    for collective, factor in (
        (ring_all_reduce, 2 * share),
        (reduce_scatter, share),
        (all_gather, share),
        (broadcast, 1),
    ):
        assert size / collective(size, workers, link) * factor == pytest.approx(50e9)


@pytest.mark.parametrize("workers", range(2, 70))
def test_no_all_reduce_sends_less_than_the_lower_bound(workers: int) -> None:
    # Patarasuk and Yuan 2009: each process has to send at least 2(N-1)/N of its data; a ring sends just that. Thakur,
    # Rabenseifner and Gropp 2005: so does recursive halving and doubling, if N is a power of two.
    bound_s = 2 * (workers - 1) / workers
    assert ring_all_reduce(1e9, workers, wire(1)) == pytest.approx(bound_s)
    assert tree_all_reduce(1e9, workers, wire(1)) >= bound_s * (1 - 1e-12)
    halving_s = halving_doubling_all_reduce(1e9, workers, wire(1))
    if workers.bit_count() == 1:
        assert halving_s == pytest.approx(bound_s)
    else:
        assert halving_s > bound_s + 0.5  # the whole array, twice, before and after


def test_adding_costs_what_the_literature_has_for_gamma() -> None:
    # Thakur, Rabenseifner and Gropp 2005, with gamma: (p-1)/p n for the ring and for halving and doubling.
    free = Link("free", latency_s=0.0, bytes_per_s=1e300)
    for all_reduce in (ring_all_reduce, halving_doubling_all_reduce):
        assert all_reduce(800, 8, free, add_s_per_byte=1e-3) == pytest.approx(0.7)
    assert reduce_scatter(800, 8, free, add_s_per_byte=1e-3) == pytest.approx(0.7)
    assert tree_all_reduce(800, 8, free, add_s_per_byte=1e-3) == pytest.approx(0.8)  # two halves, of two children
    assert tree_all_reduce(800, 2, free, add_s_per_byte=1e-3) == pytest.approx(0.4)
    assert halving_doubling_all_reduce(800, 9, free, add_s_per_byte=1e-3) == pytest.approx(0.7 + 0.8)
    # 4 hosts with 2 workers: half of the array inside; then each worker adds its half of the array, 3/4 of it.
    assert hierarchical_all_reduce(800, 4, 2, free, free, add_s_per_byte=1e-3) == pytest.approx(0.4 + 0.3)
    assert flat_ring_all_reduce(800, 4, 2, free, free, add_s_per_byte=1e-3) == pytest.approx(0.7)


def test_steps_of_ring_tree_and_hierarchy() -> None:
    # Steps that follow each other, as given for 1,024 workers: 2(N-1) = 2,046 on a ring (Horovod, Sergeev and Del Balso
    # 2018), 2 log2 N = 20 on a tree (NCCL 2.4). 2D rings (S. Jeaugey, Massively Scale Your Deep Learning Training with
    # NCCL 2.4, 2019): reduce-scatter inside of 64 hosts of 16, all-reduce between, all-gather inside.
    link = steps(us=1)
    assert ring_all_reduce(1, 1024, link) == pytest.approx(2046e-6)
    assert tree_all_reduce(1, 1024, link) == pytest.approx(20e-6)
    assert halving_doubling_all_reduce(1, 1024, link) == pytest.approx(20e-6)
    assert hierarchical_all_reduce(1, 64, 16, link, link) == pytest.approx((15 + 2 * 63 + 15) * 1e-6)
    assert flat_ring_all_reduce(1, 64, 16, link, link) == pytest.approx(2046e-6)
    assert broadcast(1, 1024, link) == pytest.approx(10e-6)
    assert reduce_scatter(1, 1024, link) == all_gather(1, 1024, link) == pytest.approx(1023e-6)


@pytest.mark.parametrize("workers", range(2, 130))
def test_the_depth_of_the_tree_is_that_of_the_trees_of_nccl(workers: int) -> None:
    # NCCL, src/graph/trees.cc: the parent of a rank has its lowest bit cleared and the next one set, or, if there is no
    # such rank, only cleared; 0 is the root.
    def depth(rank: int) -> int:
        if rank == 0:
            return 0
        bit = rank & -rank
        parent = (rank ^ bit) | (bit << 1)
        return 1 + depth(parent if parent < workers else rank ^ bit)

    deepest = max(depth(rank) for rank in range(workers))
    assert tree_all_reduce(1, workers, steps(us=1)) == pytest.approx(2 * deepest * 1e-6)


def test_trees_against_the_ring_on_24576_gpus_have_the_order_of_what_was_measured() -> None:
    # NCCL 2.4 blog (see above), figure 3: on Summit, 4,096 hosts with 6 GPUs, trees have up to 180 times less latency
    # than a ring. Latencies from NCCL's own cost model (src/graph/tuning.cc, protocol LL, in us): a base of 6.6 for the
    # ring and 6.8 for trees; per step 0.6 on NVLink, on the network 2.7 for the ring and 5.0 for trees. A model without
    # the time of the work in a step gives an upper limit, so only the order of magnitude can be reproduced.
    ring_s = 6.6e-6 + flat_ring_all_reduce(8, 4096, 6, steps(us=0.6), steps(us=2.7))
    tree_s = 6.8e-6 + tree_all_reduce(8, 4096, steps(us=5.0)) + 2 * 5 * 0.6e-6  # a chain of 6 GPUs below each node
    assert 180 <= ring_s / tree_s <= 2 * 180
    smaller = flat_ring_all_reduce(8, 64, 6, steps(us=0.6), steps(us=2.7)) / tree_all_reduce(8, 64, steps(us=5.0))
    assert smaller < ring_s / tree_s / 10  # "the difference increases with the scale"


# ---- published measurements of all-reduce ----------------------------------------------------------------------------

# S. Bekman, Machine Learning Engineering, chapter on networks, "Real network throughput": all_reduce_perf of nccl-tests
# on 8 A100 with NVLink 3 (300 GB/s in one direction): bytes and microseconds.
A100_US = {
    32 * KIB: 43.83,
    MIB: 101.9,
    16 * MIB: 276.6,
    64 * MIB: 684.6,
    256 * MIB: 2420.6,
    512 * MIB: 4218.4,
    GIB: 8203.9,
    2 * GIB: 16240.0,
    4 * GIB: 32136.0,
    8 * GIB: 64074.0,
    16 * GIB: 127997.0,
}


@pytest.mark.parametrize("size_bytes", A100_US)
def test_all_reduce_of_8_a100_from_the_preset(size_bytes: int) -> None:
    predicted_us = ring_all_reduce(size_bytes, 8, PRESETS["nvlink3"]) * 1e6
    if size_bytes >= 512 * MIB or size_bytes == 32 * KIB:
        assert predicted_us == pytest.approx(A100_US[size_bytes], rel=0.05)
    else:  # between latency and bandwidth NCCL is slower than both terms together
        assert 0.4 < predicted_us / A100_US[size_bytes] < 1.0


def test_all_reduce_of_8_h200_from_the_preset() -> None:
    # The same source, results/all-reduce-8xH200.md: 367.61 GB/s bus bandwidth with 16 GiB, the switch not adding.
    predicted_s = ring_all_reduce(16 * GIB, 8, PRESETS["nvlink4"])
    assert bus_gb_per_s(16 * GIB, 8, predicted_s) == pytest.approx(367.61, rel=0.01)


@pytest.mark.parametrize(
    ("size_bytes", "measured_gb_per_s"),
    [(GIB, 361.99), (2 * GIB, 372.42), (4 * GIB, 377.34), (8 * GIB, 380.39), (16 * GIB, 381.80)],
)
def test_all_reduce_of_32_b200_on_4_hosts_from_the_presets(size_bytes: int, measured_gb_per_s: float) -> None:
    # The same source, "Inter-node speed depends on intra-node speed": bus bandwidth of 4 hosts with 8 B200, NVLink 5
    # inside, and 8 network cards of 50 GB/s each, which the host's rings share.
    card = PRESETS["ib-ndr"]
    host = replace(card, bytes_per_s=8 * card.bytes_per_s)
    predicted_s = flat_ring_all_reduce(size_bytes, 4, 8, PRESETS["nvlink5"], host)
    assert bus_gb_per_s(size_bytes, 32, predicted_s) == pytest.approx(measured_gb_per_s, rel=0.03)


def test_the_phases_of_a_hierarchical_all_reduce_of_32_b200() -> None:
    # The same section computes, for 4 GiB, 8 x 50 GB/s per host and 740.64 GB/s bus bandwidth inside of a host:
    # 10.15 ms inside, 16.1 ms between hosts at wire rate, 26.25 ms together. It measures 22.05 ms: the phases overlap
    # in part.
    inside, host, size = wire(740.64), wire(8 * 50), 4 * GIB
    assert ring_all_reduce(size, 8, inside) == pytest.approx(10.15e-3, rel=1e-3)
    assert ring_all_reduce(size, 4, host) == pytest.approx(16.1e-3, rel=1e-3)
    together_s = hierarchical_all_reduce(size, 4, 8, inside, host)
    assert together_s == pytest.approx(26.25e-3, rel=1e-3)
    assert ring_all_reduce(size, 4, host) < 22.05e-3 < together_s
    assert sent_bytes_per_host(size, 4, 8, hierarchical=True) == pytest.approx(8 * 0.75 * GIB)  # 0.75 GiB per GPU
    assert sent_bytes_per_host(size, 4, 8, hierarchical=False) == pytest.approx(7.75 * GIB)


def test_the_network_that_resnet_50_needs() -> None:
    # Goyal et al. 2017, Accurate, Large Minibatch SGD, section 4.3: 25 million parameters of 4 bytes, all-reduce sends
    # about twice the bytes, 0.125 s of backward pass: 12.8 Gbit/s. They have 32 hosts.
    sent_bytes = sent_bytes_per_host(25e6 * 4, 32, 8, hierarchical=True)
    assert sent_bytes / 0.125 * 8 == pytest.approx(12.8e9, rel=0.04)


# ---- published scaling of data-parallel training ---------------------------------------------------------------------


@dataclass(frozen=True)
class Layer:
    """A layer in the order of the forward pass: its gradient, and its share of the time of the backward pass."""

    gradient_bytes: float
    work: float


def resnet_50() -> list[Layer]:
    """Convolutions with their batch norms, and the last layer; the work is that of the multiplications, 224 x 224."""
    layers = [conv(3, 64, 7, 112)]
    channels = 64
    for blocks, width, size in ((3, 64, 56), (4, 128, 28), (6, 256, 14), (3, 512, 7)):
        for block in range(blocks):
            before = size * 2 if block == 0 and size < 56 else size  # the 3 x 3 convolution has the stride
            layers += [conv(channels, width, 1, before), conv(width, width, 3, size), conv(width, 4 * width, 1, size)]
            if block == 0:
                layers.append(conv(channels, 4 * width, 1, size))
            channels = 4 * width
    return [*layers, Layer(4 * (2048 * 1000 + 1000), 2048 * 1000)]


def conv(inputs: int, outputs: int, kernel: int, size: int) -> Layer:
    weights = inputs * outputs * kernel**2
    return Layer(4 * (weights + 2 * outputs), weights * size**2)


def ready_buckets(layers: Sequence[Layer], backward_s: float, caps: Iterable[float]) -> list[tuple[float, float]]:
    """When each bucket is complete and how large it is, where the backward pass runs from the last layer to the first.

    A bucket is closed by the layer with which it reaches its cap, as in torch's DDP; the last cap repeats.
    """
    limits = list(caps)
    per_work_s = backward_s / sum(layer.work for layer in layers)
    time_s, size, buckets = 0.0, 0.0, []
    for layer in reversed(layers):
        time_s += layer.work * per_work_s
        size += layer.gradient_bytes
        if size >= limits[min(len(buckets), len(limits) - 1)]:
            buckets.append((time_s, size))
            size = 0.0
    return [*buckets, (backward_s, size)] if size else buckets


def exposed_s(buckets: Sequence[tuple[float, float]], backward_s: float, cost_s: Callable[[float], float]) -> float:
    sums = [(ready / backward_s, SumPoint(size, cost_s(size), 0.0)) for ready, size in buckets]
    return overlap(backward_s, sums, cores=math.inf).exposed_s


def v100_ring(hosts: int, workers_per_host: int) -> Callable[[float], float]:
    """All-reduce in the cluster of DLPerf: hosts with 8 V100 (NVLink 2) and one InfiniBand card with 100 Gbit/s."""
    inside, between = PRESETS["nvlink2"], PRESETS["ib-edr"]
    return lambda size: flat_ring_all_reduce(size, hosts, workers_per_host, inside, between)


def test_the_model_of_resnet_50_has_its_published_size() -> None:
    layers = resnet_50()
    assert sum(layer.gradient_bytes for layer in layers) == 4 * 25_557_032  # torchvision
    assert sum(layer.work for layer in layers) == pytest.approx(4.1e9, rel=0.01)  # multiplications of v1.5


# Oneflow-Inc/DLPerf, Megatron-LM/README.md: milliseconds per step of a GPT with 16 layers of width 1536, 2,048
# positions and 51,200 words, 2 sequences per GPU, fp16, data-parallel on 1, 8, 16 and 32 GPUs (8 per host).
GPT_STEP_MS = {(1, 1): 464.12, (1, 8): 480.96, (2, 8): 664.46, (4, 8): 683.51}


@pytest.mark.parametrize(("hosts", "workers_per_host"), GPT_STEP_MS)
def test_scaling_of_gpt(hosts: int, workers_per_host: int) -> None:
    # Inputs are the time of one GPU, the sizes of the model, and the cluster. Megatron's own data parallelism, the
    # default of this version, reduces all gradients in fp16 after the backward pass: one bucket, ready at its end.
    width, layers, words, positions = 1536, 16, 51_200, 2048
    in_layers = layers * (12 * width**2 + 13 * width)
    gradient_bytes = 2 * (in_layers + (words + positions) * width + 2 * width)
    one_s = GPT_STEP_MS[1, 1] / 1e3
    backward_s = 3 / 4 * one_s  # activations are computed again, so backward is three forward passes
    exposed = exposed_s([(backward_s, gradient_bytes)], backward_s, v100_ring(hosts, workers_per_host))
    assert one_s + exposed == pytest.approx(GPT_STEP_MS[hosts, workers_per_host] / 1e3, rel=0.08)


# Oneflow-Inc/DLPerf, NVIDIADeepLearningExamples/PyTorch/BERT/README.md: sentences per second of BERT base in fp32, by
# sentences per GPU, on the same cluster.
BERT_PER_S = {
    32: {(1, 1): 119.6, (1, 4): 457.72, (1, 8): 921.32, (2, 8): 1499.4, (4, 8): 2885.81},
    48: {(1, 1): 121.94, (1, 4): 464.66, (1, 8): 928.01, (2, 8): 1584.32, (4, 8): 3039.3},
}


@pytest.mark.parametrize("batch", BERT_PER_S)
@pytest.mark.parametrize(("hosts", "workers_per_host"), BERT_PER_S[32])
def test_scaling_of_bert(batch: int, hosts: int, workers_per_host: int) -> None:
    # NVIDIA's program wraps the model in apex's DDP with message_size=250000000 elements. BERT base has 110 million
    # with its heads, so that there is one bucket, complete when the backward pass ends.
    width, words, positions = 768, 30_528, 512
    embeddings = (words + positions + 2 + 2) * width
    heads = 2 * (width**2 + width) + 2 * width + words + 2 * width + 2  # pooler, transform, its norm, and two outputs
    gradient_bytes = 4 * (embeddings + 12 * (12 * width**2 + 13 * width) + heads)
    assert gradient_bytes / 4 < 250_000_000
    measured = BERT_PER_S[batch]
    one_s = batch / measured[1, 1]
    backward_s = 2 / 3 * one_s
    exposed = exposed_s([(backward_s, gradient_bytes)], backward_s, v100_ring(hosts, workers_per_host))
    predicted_per_s = batch * hosts * workers_per_host / (one_s + exposed)
    assert predicted_per_s == pytest.approx(measured[hosts, workers_per_host], rel=0.09)


# Oneflow-Inc/DLPerf, reports/dlperf_benchmark_test_report_v1.md: images per second of ResNet-50 v1.5 with torch's DDP,
# fp32, 128 images per GPU, on the same cluster.
RESNET_PER_S = {(1, 1): 354.40, (1, 8): 2719.07, (2, 8): 5307.21, (4, 8): 10632.33}


@pytest.mark.parametrize(("hosts", "workers_per_host"), RESNET_PER_S)
def test_scaling_of_resnet_50(hosts: int, workers_per_host: int) -> None:
    # torch's DDP has buckets of 25 MiB, the first of 1 MiB, and reduces them during the backward pass, which is two
    # thirds of a step. Almost all of it is hidden; what is measured beyond that is not communication.
    one_s = 128 / RESNET_PER_S[1, 1]
    backward_s = 2 / 3 * one_s
    buckets = ready_buckets(resnet_50(), backward_s, caps=[MIB, 25 * MIB])
    exposed = exposed_s(buckets, backward_s, v100_ring(hosts, workers_per_host))
    predicted_per_s = 128 * hosts * workers_per_host / (one_s + exposed)
    assert predicted_per_s == pytest.approx(RESNET_PER_S[hosts, workers_per_host], rel=0.07)


def test_most_of_the_communication_of_resnet_50_is_hidden_on_32_hosts() -> None:
    # Goyal et al. 2017, figure 8: most of the all-reduce time is hidden. Inputs of sections 4.1 to 4.3: every gradient
    # is reduced on its own, by halving and doubling between 32 hosts with 50 Gbit/s; backward takes 120 ms.
    network, backward_s = PRESETS["50gbe"], 0.120
    buckets = ready_buckets(resnet_50(), backward_s, caps=[1])

    def cost_s(size: float) -> float:
        return halving_doubling_all_reduce(size, 32, network)

    total_s = sum(cost_s(size) for _, size in buckets)
    assert total_s > 0.3 * backward_s
    assert exposed_s(buckets, backward_s, cost_s) < 0.1 * total_s


# Zhang et al. 2020, Is Network the Bottleneck of Distributed Training?, data in netx-repo/training-bottleneck: VGG-16
# on a V100, 0.1945 s per step. Milliseconds from one gradient to the next, from the last layer to the first, and MB.
VGG16_STEP_S = 0.19452
VGG16_MS_AND_MB = (
    *(
        (0.484, 0.004),
        (0.042, 16.384),
        (0.309, 67.125),
        (1.620, 411.058),
        (1.787, 0.004),
        (1.945, 9.439),
        (0.153, 0.004),
    ),
    *((1.956, 9.439), (0.184, 0.004), (1.954, 9.439), (0.954, 0.004), (5.478, 9.439), (0.582, 0.004), (5.422, 9.439)),
    *((0.504, 0.004), (3.187, 4.721), (1.533, 0.002), (6.424, 2.360), (1.048, 0.002), (6.429, 2.360), (0.944, 0.002)),
    *((3.977, 1.181), (3.179, 0.001), (13.631, 0.590), (1.983, 0.001), (8.082, 0.001), (0.079, 0.295), (5.901, 0.001)),
    *((21.858, 0.148), (4.439, 0.001), (5.550, 0.007)),
)


def vgg16_buckets() -> tuple[list[tuple[float, float]], float]:
    """Horovod's rule: what was collected is sent after 5 ms or with 64 MiB."""
    time_s, since_s, size, buckets = 0.0, 0.0, 0.0, []
    for wait_ms, megabytes in VGG16_MS_AND_MB:
        time_s, since_s, size = time_s + wait_ms / 1e3, since_s + wait_ms / 1e3, size + megabytes * 1e6
        if since_s >= 0.005 or size >= 64 * MIB:
            buckets.append((time_s, size))
            since_s = size = 0.0
    return [*buckets, (time_s, size)] if size else buckets, time_s


@pytest.mark.parametrize("workers", [16, 32, 64])
def test_scaling_of_vgg_16_on_a_network_that_is_used_to_its_full(workers: int) -> None:
    # The paper: with all of 100 Gbit/s the scaling factor is close to one (99 %), with 10 Gbit/s it is not: gradients
    # would have to be several times smaller.
    buckets, backward_s = vgg16_buckets()
    assert sum(size for _, size in buckets) == pytest.approx(4 * 138.36e6, rel=0.001)

    def factor(gbit_per_s: float) -> float:
        exposed = exposed_s(buckets, backward_s, lambda size: ring_all_reduce(size, workers, wire(gbit_per_s / 8)))
        return VGG16_STEP_S / (VGG16_STEP_S + exposed)

    assert factor(100) == pytest.approx(0.99, abs=0.015)
    assert factor(10) < 0.5
    assert factor(10) < factor(25) < factor(40) < factor(100)


# ---- the functions themselves ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_one_worker_takes_no_time(collective: Callable[..., float]) -> None:
    assert collective(1e9, 1, PRESETS["1gbe"]) == 0.0


def test_one_host_and_one_worker_per_host() -> None:
    inside, between = PRESETS["nvlink4"], PRESETS["25gbe"]
    for over_hosts in (hierarchical_all_reduce, flat_ring_all_reduce):
        assert over_hosts(1e9, 1, 1, inside, between) == 0.0
        assert over_hosts(1e9, 1, 8, inside, between) == pytest.approx(ring_all_reduce(1e9, 8, inside))
        assert over_hosts(1e9, 8, 1, inside, between) == pytest.approx(ring_all_reduce(1e9, 8, between))
    for hierarchical in (True, False):
        assert sent_bytes_per_host(1e9, 1, 8, hierarchical=hierarchical) == 0.0
        assert sent_bytes_per_host(1e9, 8, 1, hierarchical=hierarchical) == pytest.approx(1.75e9)


def test_what_is_sent_between_hosts_sets_the_time_between_hosts() -> None:
    link = wire(1)
    for hosts, workers_per_host in ((2, 8), (3, 5), (16, 2)):
        sent = sent_bytes_per_host(1e9, hosts, workers_per_host, hierarchical=True)
        assert hierarchical_all_reduce(1e9, hosts, workers_per_host, wire(1e200), link) == pytest.approx(sent / 1e9)
        sent = sent_bytes_per_host(1e9, hosts, workers_per_host, hierarchical=False)
        assert flat_ring_all_reduce(1e9, hosts, workers_per_host, wire(1e200), link) == pytest.approx(sent / 1e9)
        # With a slow link inside, that one limits a ring.
        slow = flat_ring_all_reduce(1e9, hosts, workers_per_host, wire(0.5), link)
        assert slow == pytest.approx(2 * sent / 1e9)


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_costs_grow_with_size_and_workers_and_fall_with_the_rate(collective: Callable[..., float]) -> None:
    link = PRESETS["10gbe"]
    for workers in (2, 3, 5, 8, 13):
        assert collective(0, workers, link) > 0
        assert collective(1e6, workers, link) < collective(1e7, workers, link)
        assert collective(1e6, workers, PRESETS["100gbe"]) < collective(1e6, workers, link)
    assert collective(1e6, 2, link) < collective(1e6, 4, link) < collective(1e6, 16, link)


def test_workers_beyond_a_power_of_two_send_all_they_have() -> None:
    link = Link("simple", latency_s=1.0, bytes_per_s=1.0)
    eight_s = halving_doubling_all_reduce(16, 8, link)
    assert eight_s == pytest.approx(6 + 2 * 14)
    for workers in range(9, 16):
        assert halving_doubling_all_reduce(16, workers, link) == pytest.approx(eight_s + 2 * (1 + 16))
    assert halving_doubling_all_reduce(16, 16, link) == pytest.approx(8 + 2 * 15)
    assert halving_doubling_all_reduce(16, 3, link) == pytest.approx(2 + 2 * 8 + 2 * (1 + 16))


def test_small_messages_are_for_trees_and_large_ones_for_rings() -> None:
    link = PRESETS["ib-hdr"]
    assert tree_all_reduce(1e3, 64, link) < ring_all_reduce(1e3, 64, link) / 5
    assert ring_all_reduce(1e10, 64, link) < tree_all_reduce(1e10, 64, link)


@pytest.mark.parametrize("bad", [0, -1, 2.5])
def test_a_number_of_workers_that_cannot_be(bad: int) -> None:
    for collective in COLLECTIVES:
        with pytest.raises(ValueError, match=rf"workers={bad}"):
            collective(1.0, bad, PRESETS["1gbe"])
    for name, hosts, workers in (("hosts", bad, 2), ("workers_per_host", 2, bad)):
        for over_hosts in (hierarchical_all_reduce, flat_ring_all_reduce):
            with pytest.raises(ValueError, match=rf"{name}={bad}"):
                over_hosts(1.0, hosts, workers, PRESETS["nvlink3"], PRESETS["1gbe"])
        with pytest.raises(ValueError, match=rf"{name}={bad}"):
            sent_bytes_per_host(1.0, hosts, workers, hierarchical=True)


@pytest.mark.parametrize("bad", [-1.0, math.nan, math.inf])
def test_sizes_and_times_that_cannot_be(bad: float) -> None:
    for collective in COLLECTIVES:
        with pytest.raises(ValueError, match=rf"size_bytes={bad}"):
            collective(bad, 2, PRESETS["1gbe"])
    for all_reduce in ALL_REDUCES:
        with pytest.raises(ValueError, match=rf"add_s_per_byte={bad}"):
            all_reduce(1.0, 2, PRESETS["1gbe"], add_s_per_byte=bad)


# ---- links -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_found_in_any_case_and_stay_below_the_line(name: str) -> None:
    link = parse_link(name.upper())
    assert link is PRESETS[name]
    assert link.name == name
    assert link.source == "preset"
    assert 1e-6 <= link.latency_s <= 1e-4
    gbit = {"ib-edr": 100, "ib-hdr": 200, "ib-ndr": 400}.get(name) or (
        int(name.removesuffix("gbe")) if name.endswith("gbe") else None
    )
    if gbit is not None:
        assert 0.5 < link.bytes_per_s / (gbit * 1e9 / 8) < 0.95


@pytest.mark.parametrize(("name", "cards"), [("ib-ndr", 1), ("ib-hdr", 2), ("ib-edr", 4)])
def test_infiniband_reaches_what_the_developers_of_nccl_expect(name: str, cards: int) -> None:
    # NVIDIA/nccl-tests, issue 290: 46 to 48 GB/s with 400 Gbit/s.
    assert 46e9 <= cards * PRESETS[name].bytes_per_s <= 48e9


def test_the_names_that_the_documentation_has() -> None:
    assert {"nvlink3", "nvlink4", "pcie4", "ib-hdr", "ib-ndr", "1gbe", "10gbe", "25gbe", "100gbe"} <= set(PRESETS)
    assert PRESETS["nvlink3"].bytes_per_s == pytest.approx(234e9)


@pytest.mark.parametrize(
    ("text", "bytes_per_s"),
    [
        ("100 Gbit/s", 12.5e9),
        ("100Gbit/s", 12.5e9),
        ("100gbit/s", 12.5e9),
        ("10 Gbps", 1.25e9),
        ("10Gb/s", 1.25e9),
        ("800 Mbit/s", 1e8),
        ("800 mbit/s", 1e8),
        ("12.5 GB/s", 12.5e9),
        ("12.5GBps", 12.5e9),
        ("1e3 MB/s", 1e9),
        ("1 GiB/s", 2**30),
        (".5 TB/s", 5e11),
        ("64 kbit/s", 8e3),
        ("8 bit/s", 1.0),
        (" 3 B/s ", 3.0),
    ],
)
def test_a_speed_is_taken_as_it_is_written(text: str, bytes_per_s: float) -> None:
    link = parse_link(text)
    assert link.bytes_per_s == pytest.approx(bytes_per_s)
    assert (link.name, link.source) == (text.strip(), "given")


@pytest.mark.parametrize(
    ("text", "latency_s"),
    [
        ("100Gbit/s:5us", 5e-6),
        ("100 Gbit/s : 0.1 ms", 1e-4),
        ("100Gbit/s:2µs", 2e-6),
        ("100Gbit/s:250ns", 2.5e-7),
        ("100Gbit/s:0s", 0.0),
        ("10gbe:100us", 1e-4),
        ("400 GB/s", 3e-6),
        ("400Gbit/s", 5e-6),
        ("40Gbit/s", 25e-6),
        ("10Gbit/s", 30e-6),
        ("1Gbit/s", 50e-6),
    ],
)
def test_a_latency_is_the_one_given_or_that_of_the_speed(text: str, latency_s: float) -> None:
    assert parse_link(text).latency_s == pytest.approx(latency_s)


def test_a_preset_with_another_latency_keeps_its_rate() -> None:
    assert parse_link("10gbe:1ms") == replace(PRESETS["10gbe"], latency_s=1e-3, source="given")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("100", "which unit? Write 100Gbit/s or 100GB/s"),
        ("100:5us", "which unit? Write 100Gbit/s or 100GB/s"),
        ("0Gbit/s", "a speed of 0 is not possible"),
        ("-5 Gbit/s", "a speed of -5 is not possible"),
        ("nan Gbit/s", "a speed of nan is not possible"),
        ("inf GB/s", "a speed of inf is not possible"),
        ("1e400Gbit/s", "a speed of 1e400 is not possible"),
        ("1e308TB/s", "a speed of 1e308 TB/s is not possible"),
        ("100 gb/s", "unit 'gb/s' is not known; write bits as Gbit/s or Gbps, bytes as GB/s or GiB/s"),
        ("100Gbit", "unit 'Gbit' is not known"),
        ("100 XB/s", "unit 'XB/s' is not known"),
        ("nvlink", "is not known; write a name (nvlink2, nvlink3, "),
        ("", "is not known; write a name (nvlink2, "),
        (":5us", "is not known; write a name (nvlink2, "),
        ("10gbe:", "latency '' is not known"),
        ("10gbe:5", "latency '5' is not known; write a number with ns, us, ms or s"),
        ("10gbe:fast", "latency 'fast' is not known"),
        ("10gbe:-1us", "a latency of -1us is not possible"),
        ("10gbe:nan us", "a latency of nan us is not possible"),
    ],
)
def test_a_link_that_cannot_be_says_what_is_allowed(text: str, message: str) -> None:
    with pytest.raises(ValueError) as error:
        parse_link(text)
    assert message in str(error.value)
    assert f"link {text!r}" in str(error.value)


@pytest.mark.parametrize(
    ("values", "name"),
    [
        ({"bytes_per_s": 0.0}, "bytes_per_s"),
        ({"bytes_per_s": math.inf}, "bytes_per_s"),
        ({"latency_s": -1.0}, "latency_s"),
        ({"latency_s": math.nan}, "latency_s"),
    ],
)
def test_a_link_checks_its_values(values: dict[str, float], name: str) -> None:
    with pytest.raises(ValueError, match=name):
        Link("x", **({"latency_s": 1e-6, "bytes_per_s": 1e9} | values))
