"""Pools of real ranks, shared by every test of a session, a context of one rank, and profiles."""

from __future__ import annotations

import gc
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, settings

from tests._clock import Clock
from tests._job_variables import remove_job_variables
from tests._patience import patience

# Before anything reads them: the suite is no rank of a job in whose shell it runs.
remove_job_variables(os.environ)

# Failures are kept for the next run, but not where the checkout is read-only.
_KEPT: dict[str, Any] = {} if os.access(".", os.W_OK) else {"database": None}
# The same examples every time in continuous integration, and no limit of time for one.
settings.register_profile(
    "default",
    deadline=None,
    max_examples=25,
    suppress_health_check=[HealthCheck.too_slow],
    **_KEPT,
)
settings.register_profile("ci", settings.get_profile("default"), derandomize=True)
# For a search by hand: python -m pytest property_tests/test_topology.py --hypothesis-profile=long
settings.register_profile("long", settings.get_profile("default"), max_examples=5_000)
settings.load_profile("ci" if os.environ.get("CI") else "default")

# The process of pytest-xdist that hands out the tests runs none, and does without torch.
if TYPE_CHECKING:
    from fxtrain import DistContext
    from fxtrain.testing import Cluster

# Collection makes 600,000 objects that live to the end, which every search for garbage would visit.
gc.disable()

# What ranks and launched programs of the whole suite load. A test by itself rarely needs it.
_OFTEN = (
    "accelerate",
    "bitsandbytes",
    "fxtrain.cli.launch_command",
    "hypothesis.strategies",
    "pytest",
    "sklearn.datasets",
    "sklearn.model_selection",
    "torch.distributed.checkpoint",
    "torch.distributed.optim",
    "torch.distributed.pipelining",
    "torch.distributed.run",
    "transformers.models.bert.modeling_bert",
    "transformers.models.llama.modeling_llama",
)

# Folders of tests that start programs and ranks themselves.
_STARTING = {"cli", "launched", "launchers", "nodes", "profiling", "replicas"}

# Groups of tests that take longest.
_HALVES = ("first half of tests/cluster on ranks", "second half of tests/cluster on ranks")

_LIBRARY = Path(__file__).with_name("fxtrain")
_TESTS = Path(__file__).with_name("tests")

# Programs that tests launch, some of which read their arguments when they are imported.
collect_ignore_glob = ["tests/launched/scripts/*"]


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leaves out modules of the library without examples, and lanes of which no test is selected.

    Neither needs to be imported then.
    """
    lane = collection_path.name
    if lane in _LANES and collection_path.parent == _TESTS:
        return f"not {lane}" in config.option.markexpr or None
    if collection_path.suffix != ".py" or not collection_path.is_relative_to(_LIBRARY):
        return None
    if ">>>" not in collection_path.read_text():
        return True
    # First, since pytest imports a module that its package has not imported yet, and the package
    # would then hold the functions of another copy.
    importlib.import_module(".".join(collection_path.parent.relative_to(_LIBRARY.parent).parts))
    return None


# Folders whose tests all belong to the lane of that name.
_LANES = ("deepspeed", "megatron", "nodes", "xla")

# Names of parameters that are a number of ranks, or begin with one.
_RANKS = ("cluster", "first", "n", "ranks", "then", "world")


def pytest_itemcollected(item: pytest.Item) -> None:
    """Marks as slow what runs on four ranks, where the same test runs on two as well.

    Examples of formats are skipped where their library is not installed.
    """
    if isinstance(item, pytest.DoctestItem) and "fxtrain.precision" in item.name:
        absent = importlib.util.find_spec("torchao") is None
        item.add_marker(pytest.mark.skipif(absent, reason="needs torchao"))
    if isinstance(item, pytest.DoctestItem) and item.name.endswith("rehearsal.dry_run"):
        from tests.profiling._dry_runs import DRY_DDP

        item.add_marker(DRY_DDP)
    given = getattr(getattr(item, "callspec", None), "params", {})
    counts = [given[name] for name in _RANKS if name in given]
    if 4 in [count[0] if isinstance(count, tuple) else count for count in counts]:
        item.add_marker(pytest.mark.slow)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """What pytest-xdist keeps together, so that each of three processes starts every pool once.

    These are two halves of the tests of tests/cluster on real ranks, all other tests on real
    ranks, and files. What takes longest comes first, so that no process is left alone with it.
    """
    if not hasattr(config, "workerinput"):
        return
    groups = {item: _group(item) for item in items}
    for item in items:
        item.add_marker(pytest.mark.xdist_group(groups[item]))
    first = (*_HALVES, "others on ranks")
    items.sort(
        key=lambda item: (*(groups[item] != n for n in first), "launched" not in groups[item])
    )


def pytest_collection_finish(session: pytest.Session) -> None:
    """Leaves what was collected out of later searches for garbage.

    If tests start processes, this measures how long that takes, since their time limits follow it.
    That starts Python's fork server as well, which takes a busy machine longer than a test may.
    """
    gc.freeze()
    gc.enable()
    starts = [item for item in session.items if _starts_processes(item)]
    if not starts or session.config.option.collectonly:
        return
    preload = _OFTEN if "PYTEST_XDIST_WORKER" in os.environ else ()
    if not preload and any("launched" in item.path.parts for item in starts):
        from tests.launched._forked import LOADED as preload
    # What ranks print is captured, as it would be in a test.
    capture: Any = session.config.pluginmanager.getplugin("capturemanager")
    capture.resume_global_capture()
    stretch = patience(preload)
    capture.suspend_global_capture()
    default_s = float(session.config.option.timeout or session.config.getini("timeout"))
    for item in starts:
        given = item.get_closest_marker("timeout")
        quiet_s = float(given.args[0]) if given else default_s
        item.add_marker(pytest.mark.timeout(quiet_s * stretch), append=False)


def _starts_processes(item: pytest.Item) -> bool:
    """Whether a test starts ranks, launchers or nodes, or may do so."""
    on_ranks = "clusters" in getattr(item, "fixturenames", ())
    return on_ranks or not _STARTING.isdisjoint(item.path.parts)


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Leaves what is alive after a file's tests out of later searches, by the hundred in tests."""
    if nextitem is not None and nextitem.path != item.path:
        gc.collect()
        gc.freeze()


def _group(item: pytest.Item) -> str:
    path = item.location[0]
    if "clusters" not in getattr(item, "fixturenames", ()):
        return path
    if not path.startswith("tests/cluster"):
        return "others on ranks"
    return _HALVES[path >= "tests/cluster/test_laws"]


@pytest.fixture(scope="session")
def clusters() -> Iterator[dict[int, Cluster]]:
    """One pool per world size; its workers start with the first call."""
    from fxtrain.testing import Cluster

    longer = patience()
    pools = {n: Cluster(n, timeout_s=20.0 * longer, call_s=100.0 * longer) for n in (1, 2, 4)}
    yield pools
    for pool in pools.values():
        pool.close()


@pytest.fixture(scope="session", params=[1, 2, 4], ids=lambda n: f"world{n}")
def cluster(request: pytest.FixtureRequest, clusters: dict[int, Cluster]) -> Cluster:
    """Each pool in turn."""
    return clusters[request.param]


@pytest.fixture
def ctx() -> Iterator[DistContext]:
    """A context of one rank, on the CPU."""
    import fxtrain as fx

    with fx.detect(env={}, device="cpu") as alone:
        yield alone


@pytest.fixture(scope="session")
def pair(clusters: dict[int, Cluster]) -> Cluster:
    """The pool of two ranks."""
    return clusters[2]


@pytest.fixture
def installed(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., None]:
    """`installed(text, **objects)`: an installed package for one test.

    The text is that of its `entry_points.txt`, in which `somewhere` is a module of the objects.
    """

    def install(text: str, **objects: object) -> None:
        folder = tmp_path_factory.mktemp("installed")
        info = folder / "theirs-0.1.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 0.1\n")
        (info / "entry_points.txt").write_text(text)
        monkeypatch.setitem(sys.modules, "somewhere", SimpleNamespace(**objects))  # type: ignore[arg-type]
        monkeypatch.syspath_prepend(str(folder))

    return install


@pytest.fixture
def process_state(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Puts back what a command sets in this process for a script that it runs."""
    arguments, variables = [*sys.argv], dict(os.environ)
    monkeypatch.syspath_prepend("")  # as where a script runs; all of the path is put back
    yield
    sys.argv[:] = arguments
    os.environ.clear()
    os.environ.update(variables)


@pytest.fixture
def clock_of(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """`clock_of(*modules)`: the clock that these modules read, which the test moves."""

    def put(*modules: Any, clock: Any = None) -> Any:
        clock = Clock() if clock is None else clock
        for module in modules:
            monkeypatch.setattr(module, "time", clock)
        return clock

    return put


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any, str, int], None]:
    """`failing(os, "link", errno.EPERM)`: calls of a function of the system fail so."""

    def fail(module: Any, name: str, code: int) -> None:
        def call(*_: object, **__: object) -> None:
            raise OSError(code, os.strerror(code))

        monkeypatch.setattr(module, name, call)

    return fail
