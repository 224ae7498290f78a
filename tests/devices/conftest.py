"""Pools of ranks on devices that are not the CPU.

"shadow" is compiled for these tests (shadow.cpp) and runs anywhere: a tensor that was left on the
CPU is an error there, as on a GPU. "cuda" needs a GPU, or takes the device that the variable
FXTRAIN_GPU_TESTS_ON names in its place. Two ranks use NCCL where there are two GPUs, and share one
through gloo otherwise, since NCCL refuses that.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from fxtrain.testing import Cluster
from tests.devices._device import DEVICE, LIBRARIES, STAND_IN, gpus, many_ranks

# Importing it makes its device the accelerator of the process; only ranks do. The other one is a
# program.
collect_ignore = ["shadow.py", "program.py"]

DEVICES = [
    pytest.param("shadow", marks=pytest.mark.shadow),
    pytest.param(DEVICE, marks=pytest.mark.gpu, id="cuda"),
]
# Names of tests that passed, where a run of limited length is continued by the next one.
_PASSED = os.environ.get("FXTRAIN_GPU_PASSED", "")
_MARKS = dict.fromkeys(("gpu", "nccl", "pair_of_gpus"), "gpu") | {
    "queued": "shadow",
    "device_only": "shadow",
}
# What the device "shadow" cannot do, and how the names of tests that need it begin.
_SHADOW_LACKS = {
    "torch assigns to .data between the CPU and devices of its own only": (
        "test_stages_on_two_devices",
        "test_tensor_parallelism_on_two_devices",
        "test_streamed_weights",
    ),
    "bitsandbytes has no kernels for this device": (
        "test_fsdp_at_one_rank",
        "test_fsdp_over_two",
        *(f"test_quantized_weights_on_the_device[{name}" for name in ("bnb8", "nf4", "fp4")),
        *(f"test_a_head_trains_over_quantized_layers[{name}" for name in ("bnb8", "nf4")),
    ),
    "torchao has no kernels for this device": ("test_quantized_weights_on_the_device[int4",),
    "torch's compiler generates no code for this device": (
        "test_a_step_never_waits_for_the_device[compiled",
        "test_a_step_never_waits_for_the_device[graphs",
        "test_variants_train_as_the_plain_loop[compiled",
        "test_variants_train_as_the_plain_loop[graphs",
        "test_compiled_modules",
    ),
}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip what needs a GPU where there is none, and leave out what has passed before."""
    for item in items:
        marks = {_MARKS[name] for name in getattr(item, "fixturenames", ()) if name in _MARKS}
        for mark in marks:
            item.add_marker(mark)
    passed = set(Path(_PASSED).read_text().splitlines()) if os.path.exists(_PASSED) else set()
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid in passed])
    items[:] = [item for item in items if item.nodeid not in passed]
    if STAND_IN == "shadow":
        for reason, names in _SHADOW_LACKS.items():
            for item in items:
                if item.name.startswith(names):
                    item.add_marker(pytest.mark.skip(reason=reason))
    if torch.cuda.is_available() or STAND_IN:
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="torch sees no CUDA device"))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Note down what passed."""
    if _PASSED and report.when == "call" and report.passed:
        with open(_PASSED, "a") as file:
            file.write(f"{report.nodeid}\n")


def _pool(n: int, device: str, library: str | None = None) -> Iterator[Cluster]:
    preload = ("tests.devices.shadow",) if device == "shadow" else ()
    if device == "shadow":
        library = library or LIBRARIES[device]
    if device == "cuda" and gpus() < n:
        library = "gloo"
    pool = Cluster(n, timeout_s=30.0, call_s=120.0, device=device, preload=preload, library=library)
    yield pool
    pool.close()


@pytest.fixture(scope="session", params=DEVICES)
def one(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """One rank."""
    yield from _pool(1, request.param)


@pytest.fixture(scope="session", params=DEVICES)
def two(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """Two ranks."""
    yield from _pool(2, request.param)


@pytest.fixture(scope="session")
def queued() -> Iterator[Cluster]:
    """Two ranks whose collectives are queued and matched by order alone, as those of NCCL are."""
    yield from _pool(2, "shadow", "cpu:gloo,shadow:ordered")


@pytest.fixture(scope="session")
def device_only() -> Iterator[Cluster]:
    """As `queued`, in a group without tensors of the CPU, as `init_process_group("nccl")` opens."""
    yield from _pool(2, "shadow", "shadow:ordered")


@pytest.fixture(
    params=[
        pytest.param("queued", marks=pytest.mark.shadow),
        pytest.param("pair_of_gpus", marks=pytest.mark.gpu),
    ]
)
def in_order(request: pytest.FixtureRequest) -> Cluster:
    """Two ranks whose collectives are matched by order: `queued`, and NCCL between two GPUs."""
    if request.param == "pair_of_gpus" and STAND_IN:
        pytest.skip("collectives of this device wait for the other ranks")
    return request.getfixturevalue(request.param)


@pytest.fixture(scope="session")
def gpu() -> Iterator[Cluster]:
    """One rank on a GPU, for what no other device has."""
    yield from _pool(1, DEVICE)


@pytest.fixture(scope="session")
def nccl() -> Iterator[Cluster]:
    """One rank in a group of NCCL, which a context of one rank does not open."""
    yield from _pool(1, DEVICE, LIBRARIES[DEVICE])


@pytest.fixture(scope="session")
def pair_of_gpus() -> Iterator[Cluster]:
    """Two ranks with a GPU each: gloo sends tensors of a GPU in some collectives only."""
    if gpus() < 2:
        pytest.skip("torch sees fewer than two CUDA devices")
    yield from _pool(2, DEVICE)


@pytest.fixture(scope="session")
def many() -> Iterator[Cluster]:
    """A rank for each GPU of the machine: four, six or eight."""
    if many_ranks() < 4:
        pytest.skip("torch sees fewer than four CUDA devices")
    yield from _pool(many_ranks(), DEVICE)
