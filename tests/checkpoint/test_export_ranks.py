"""Exporting and loading spread tensors and wrapped models, on real ranks."""

import weakref
from pathlib import Path

import pytest
import safetensors.torch
import torch

import fxtrain as fx
from fxtrain.models import export, load_model
from fxtrain.models.folder import INDEX
from tests.checkpoint._exports import (
    Holder,
    Tied,
    as_the_ecosystem_reads,
    assert_same,
    full_disk,
    names_in,
    some_state,
)
from tests.checkpoint._ranks import ready


def _spread(ctx, mesh_shape, seed=0):
    """A state with tensors laid out over a mesh in every way, and the same in one place."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=("a", "b")[: len(mesh_shape)])
    ways = [Replicate(), Shard(0), Shard(1)]
    generator = torch.Generator().manual_seed(seed)
    layouts = [[one] for one in ways]
    if len(mesh_shape) == 2:
        layouts = [[one, two] for one in ways for two in ways]
    whole, parts = {"plain": torch.arange(5.0) + seed}, {"plain": torch.arange(5.0) + seed}
    for place, layout in enumerate(layouts):
        for shape in ((8, 4), (5, 3), (1, 2)):
            name = f"w{place}_{shape[0]}"
            whole[name] = torch.randn(shape, generator=generator).to(
                torch.bfloat16 if place % 2 else torch.float32
            )
            parts[name] = distribute_tensor(whole[name], mesh, layout)
    return whole, parts


def _export_spread(ctx, mesh_shape, folder, limit, sharded, seed=0):
    whole, parts = _spread(ctx, mesh_shape, seed)
    alive, most, mine = weakref.WeakSet(), [0], []

    def watch(tensor):
        full = real(tensor)
        if full is not tensor and hasattr(tensor, "placements"):
            alive.add(full)
            most[0] = max(most[0], len(alive))
        return full

    from fxtrain.models import exporting
    from fxtrain.ops import whole_tensors

    def written(path, *args):
        mine.append(path.name)
        return real_write(path, *args)

    real, whole_tensors.full_values = whole_tensors.full_values, watch
    real_write, exporting.writing = exporting.writing, written
    try:
        files = export(parts, folder, limit, ctx=ctx, sharded=sharded)
    finally:
        whole_tensors.full_values, exporting.writing = real, real_write
    return [file.name for file in files], most[0], whole, mine


@pytest.mark.parametrize(("ranks", "mesh"), [(2, (2,)), (4, (4,)), (4, (2, 2))])
@pytest.mark.parametrize("sharded", [False, True])
def test_spread_tensors_are_gathered_one_by_one(clusters, tmp_path, ranks, mesh, sharded):
    for limit in ("5GB", 200, 1):
        found = ready(clusters[ranks]).run(_export_spread, mesh, tmp_path, limit, sharded)
        names, _, whole, _ = found[0]
        assert all(answer[0] == names for answer in found)
        turns = ranks if sharded else 1
        for rank, answer in enumerate(found):
            assert answer[3] == (names[rank::turns] if rank < turns else [])
        # One that arrives and, on the rank that writes it, one that is being written.
        assert max(answer[1] for answer in found) <= 2
        assert len(names) == (1 if limit == "5GB" else len(names))
        assert_same(as_the_ecosystem_reads(tmp_path), whole)
        assert set(names_in(tmp_path)) == {*names, *([INDEX] if len(names) > 1 else [])}
    assert len(names) == len(whole)


def _load_spread(ctx, mesh_shape, folder):
    """Fill spread tensors from a folder; the rows that were read, and whether all fits."""
    whole, parts = _spread(ctx, mesh_shape)
    _, other = _spread(ctx, mesh_shape, seed=1)
    read = {}

    class Watched:
        def __init__(self, *args, **kwargs):
            self._file = safetensors.safe_open(*args, **kwargs)

        def __enter__(self):
            return self

        def __exit__(self, *error):
            return None

        def get_tensor(self, name):
            read[name] = self._file.get_tensor(name)
            return read[name]

        def get_slice(self, name):
            rows = self._file.get_slice(name)

            class Rows:
                def __getitem__(self, at):
                    read[name] = rows[at]
                    return read[name]

            return Rows()

    from fxtrain.models import tensor_sources

    real, tensor_sources.safe_open = tensor_sources.safe_open, Watched
    try:
        holder = Holder(other)
        load_model(folder, holder, ctx=ctx)
    finally:
        tensor_sources.safe_open = real
    state = holder.state_dict()
    for name, tensor in parts.items():
        if name == "plain":
            assert torch.equal(state[name], whole[name])
            continue
        local = tensor.to_local()
        assert torch.equal(state[name].to_local(), local), name
        assert state[name].placements == tensor.placements
        assert read[name].numel() == local.numel() if name in read else local.numel() == 0, name
    return sorted(read)


@pytest.mark.parametrize(("ranks", "mesh"), [(2, (2,)), (4, (4,)), (4, (2, 2))])
def test_a_rank_reads_its_own_part_only(clusters, tmp_path, ranks, mesh):
    ready(clusters[ranks]).run(_export_spread, mesh, tmp_path, 200, False)
    ready(clusters[ranks]).run(_load_spread, mesh, tmp_path)


def _told(call, *args, **kwargs):
    """The kind and words of an fxtrain error; raising it would end the pool's ranks."""
    try:
        call(*args, **kwargs)
    except fx.FxError as error:
        return type(error).__name__, str(error)


def _other_than_rank_0(ctx, folder):
    return _told(export, {"w": torch.ones(2 + ctx.rank)}, folder, ctx=ctx)


def _breaks(ctx, folder, broken, sharded):
    """One rank cannot write."""
    _, parts = _spread(ctx, (ctx.world_size,), seed=5)
    real = Path.open
    if ctx.rank == broken:
        Path.open = full_disk("model", 400)
    try:
        return _told(export, parts, folder, 200, ctx=ctx, sharded=sharded)
    finally:
        Path.open = real


@pytest.mark.parametrize(("broken", "sharded"), [(0, False), (0, True), (1, True)])
def test_all_ranks_raise_what_one_of_them_met(pair, tmp_path, broken, sharded):
    names, _, whole, _ = ready(pair).run(_export_spread, (2,), tmp_path, 200, False)[0]
    one, other = ready(pair).run(_breaks, tmp_path, broken, sharded)
    assert one == other and one[0] == "CheckpointError" and "No space left" in one[1]
    assert set(names_in(tmp_path)) == {*names, INDEX}
    assert_same(as_the_ecosystem_reads(tmp_path), whole)


def test_ranks_with_different_models_are_told(pair, tmp_path):
    one, other = ready(pair).run(_other_than_rank_0, tmp_path)
    assert one[0] == other[0] == "CollectiveError"
    assert "different values" in one[1] and names_in(tmp_path) == []


def _bad_on_one(ctx, folder):
    state = {"w": torch.ones(2), "x": 3 if ctx.rank else torch.ones(1)}
    return _told(export, state, folder, ctx=ctx)


def _load_bad_on_one(ctx, folder):
    source = folder if ctx.rank == 0 else folder / "absent"
    return _told(load_model, source, Holder(some_state()), ctx=ctx)


def test_an_error_of_one_rank_is_that_of_all(pair, tmp_path):
    one, other = ready(pair).run(_bad_on_one, tmp_path)
    assert one == other and one[0] == "CheckpointError" and "x is a int" in one[1]
    export(some_state(), tmp_path)
    one, other = ready(pair).run(_load_bad_on_one, tmp_path)
    assert one == other and one[0] == "CheckpointError" and "absent" in one[1]


def _alone_with_spread(ctx, folder):
    return _told(export, _spread(ctx, (ctx.world_size,))[1], folder)


def test_spread_tensors_need_the_ranks(pair, tmp_path):
    for _, words in ready(pair).run(_alone_with_spread, tmp_path):
        assert "w0_8 is sharded over ranks" in words


def _wrapped(ctx, folder, seed):
    torch.manual_seed(seed)
    with torch.random.fork_rng():
        model = fx.wrap(Tied(), ctx)
    export(model, folder, 50)
    return {name: tensor.clone() for name, tensor in model.module.state_dict().items()}


def _load_wrapped(ctx, folder):
    model = fx.wrap(Tied(), ctx)
    load_model(folder, model)
    return dict(model.module.state_dict())


def test_a_wrapped_model_round_trips(cluster, tmp_path):
    state = ready(cluster).run(_wrapped, tmp_path, 3)[0]
    for found in ready(cluster).run(_load_wrapped, tmp_path):
        assert_same(found, state)
