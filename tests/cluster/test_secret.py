"""The secret of a run: who has another one is named, and what it sends is not unpickled."""

import os
from concurrent.futures import ThreadPoolExecutor

import attrs
import pytest

import fxtrain as fx
from fxtrain import ops
from fxtrain._secret import SECRET, derive_key
from fxtrain.ops.rendezvous_store import open_store
from fxtrain.ops.transport.pickled import dump, unpickle_all
from fxtrain.state.topology import Topology
from fxtrain.testing import free_port
from tests._errors import raises_code

KEYS = [derive_key("a secret of a run"), derive_key("another secret of a run"), b""]


def _touch(folder):
    open(os.path.join(folder, str(os.getpid())), "x").close()


class _Harm:
    """Runs code where it is unpickled."""

    def __init__(self, folder):
        self.folder = str(folder)

    def __reduce__(self):
        return _touch, (self.folder,)


def _with_key(ctx, key):
    return attrs.evolve(ctx, comm=attrs.evolve(ctx.comm, key=key, timeout_s=0.5))


@pytest.mark.parametrize("sent", KEYS, ids=["one", "another", "none"])
@pytest.mark.parametrize("known", KEYS[:2], ids=["one", "another"])
def test_a_pickle_is_read_under_its_own_seal_only(sent, known, tmp_path):
    with fx.detect({}, device="cpu") as ctx:
        blob = dump(_Harm(tmp_path), _with_key(ctx, sent))
        if sent == known:
            unpickle_all("gather", {1: blob}, _with_key(ctx, known))
        else:
            with raises_code("FX103"):
                unpickle_all("gather", {1: blob}, _with_key(ctx, known))
    assert len(list(tmp_path.iterdir())) == (sent == known)


def _intrude(ctx, key, folder):
    """Rank 1 has another secret, and sends what runs code."""
    if ctx.rank == 1:
        ctx = _with_key(ctx, key)
    try:
        ops.gather_objects(_Harm(folder), ctx)
    except fx.CollectiveError as error:
        return str(error), os.getpid()
    return "", os.getpid()


def test_what_an_intruder_sends_is_not_unpickled(pair, tmp_path):
    words, pid = pair.outcomes(_intrude, KEYS[1], str(tmp_path))[0]
    pair.close()  # the calls of these ranks differ
    assert "is not signed with this run's secret, so it was not unpickled" in words
    assert not (tmp_path / str(pid)).exists()


def _exchange(ctx):
    return ops.gather_objects({"rank": ctx.rank}, ctx), len(ctx.comm.key), repr(ctx.comm)


def test_ranks_of_a_pool_have_a_secret(pair):
    for found, length, text in pair.run(_exchange):
        assert found == [{"rank": 0}, {"rank": 1}]
        assert length == 32 and "key" not in text


def _meet(keys):
    port = free_port()

    def join(rank):
        topology = Topology(rank=rank, world_size=len(keys), main_port=port)
        try:
            return open_store(topology, 20.0, key=keys[rank])
        except fx.errors.ContextError as error:
            return str(error)

    with ThreadPoolExecutor(len(keys)) as pool:
        return list(pool.map(join, range(len(keys))))


@pytest.mark.parametrize("others", [KEYS[1], KEYS[2]], ids=["another", "none"])
def test_ranks_with_different_secrets_say_so_on_all(others):
    first, second, third = _meet([KEYS[0], others, KEYS[0]])
    assert f"Rank 0 of 3: {SECRET} on this rank differs from that on ranks 1" in first
    assert "Rank 1 of 3" in second and "differs from that on ranks 0, 2" in second
    assert "differs from that on ranks 1" in third


@pytest.mark.parametrize("key", KEYS[::2], ids=["secret", "none"])
def test_ranks_with_the_same_secret_meet(key):
    assert not [found for found in _meet([key, key]) if isinstance(found, str)]
