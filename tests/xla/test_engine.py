"""What XLA asks for beyond the laws: one graph per step, checkpoints, formats, data, refusals."""

import pytest
import torch

import fxtrain as fx
from tests.xla import _ranks

pytestmark = [pytest.mark.xla, pytest.mark.timeout(400)]


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_step_is_one_graph_that_is_compiled_once(device, accumulate):
    (found,) = device.run(_ranks.graphs_per_step, accumulate)
    assert [cuts for cuts, _ in found] == [1] * len(found)
    assert sum(compiled for _, compiled in found[: 2 * accumulate]) >= 1
    assert [compiled for _, compiled in found[3 * accumulate :]] == [0] * (16 - 3 * accumulate)


def test_a_new_shape_is_warned_of_with_the_count(alone):
    (found,) = alone.run(_ranks.warnings_of)
    assert len(found) == 1
    assert "recompiled step 6 of this model" in found[0]
    assert "drop_last=True" in found[0]


def _went_on_and_restored(pool, folder):
    plan = fx.Plan(strategy=fx.XLA(), accumulate=2)
    ((went_on, restored),) = pool.run(_ranks.saved_and_restored, plan, str(folder))
    assert went_on[1].keys() == restored[1].keys()
    return went_on, restored


def test_a_restored_run_goes_on_bit_for_bit(alone, tmp_path):
    went_on, restored = _went_on_and_restored(alone, tmp_path)
    assert went_on[0] == restored[0]
    for name, value in went_on[1].items():
        assert torch.equal(value, restored[1][name]), name


def test_a_restored_run_goes_on_over_several_devices(spmd, tmp_path):
    """Within rounding: of the same program, CPU devices give other last bits now and then."""
    went_on, restored = _went_on_and_restored(spmd, tmp_path)
    assert went_on[0] == pytest.approx(restored[0], rel=1e-4)
    for name, value in went_on[1].items():
        torch.testing.assert_close(restored[1][name], value, rtol=1e-3, atol=1e-4)


def test_a_checkpoint_goes_from_torch_to_xla_and_on(pair, device, tmp_path):
    """Saved by DDP at two ranks; a further step on XLA is that of torch."""
    pair.run(_ranks.saves, fx.Plan(), str(tmp_path), 3)
    with fx.detect({}, device="cpu") as ctx:
        wanted = _ranks.after_restoring(ctx, fx.Plan(strategy=fx.Single()), str(tmp_path), 2)
    (got,) = device.run(_ranks.after_restoring, fx.Plan(strategy=fx.XLA()), str(tmp_path), 2)
    assert got.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(got[name], value, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("downcast", [False, True])
def test_bf16_is_computed_with_and_held_if_asked(device, downcast):
    ((inside, made, after, losses),) = device.run(_ranks.in_bf16, downcast)
    assert inside == {torch.bfloat16 if downcast else torch.float32}
    assert made == {torch.bfloat16}
    assert after == {torch.float32}
    assert sum(losses[-10:]) < 0.95 * sum(losses[:10])


@pytest.mark.parametrize("ahead", [False, True])
def test_rows_arrive_in_order_each_device_with_its_own(alone, spmd, ahead):
    with fx.detect({}, device="cpu") as ctx:
        wanted = torch.cat([batch[0] for batch in _ranks.loader_of(ctx, fx.Plan(), rows=16)])
    for pool, split in ((alone, ""), (spmd, "{devices=[4,1]0,1,2,3}")):
        ((rows, splits),) = pool.run(_ranks.placed, ahead)
        assert torch.equal(rows, wanted)
        assert splits == {split}


def test_the_mesh_says_who_shares_parameters(spmd):
    (whole,) = spmd.run(_ranks.splits, fx.Mesh(replicate=4))
    assert set(whole) <= {"", "{replicated}"}
    (split,) = spmd.run(_ranks.splits, fx.Mesh(shard=4))
    assert all(spec.startswith("{devices=[4,1]0,1,2,3") for spec in split)


def test_collectives_of_one_rank_keep_tensors_on_the_device(device):
    (found,) = device.run(_ranks.ops_alone)
    for name in ("gather", "reduce", "broadcast", "padded"):
        assert found[name].tolist() == [0.0, 1.0, 2.0], name
    assert found["valid"] == (3, 6)
    (first, inside, after), (again, other, later) = found["seeded"]
    assert torch.equal(first, again) and torch.equal(after, later)
    assert not torch.equal(inside, other) and not torch.equal(first, after)


def test_refusals_name_what_to_do(spmd):
    (found,) = spmd.run(_ranks.refusals)
    assert "Plan(strategy=fx.XLA())" in found["ddp"] and "FSDP()" in found["fsdp"]
    assert "do not support fp16" in found["fp16"]
    assert "precision='bf16'" in found["downcast"]
    assert "backend='openxla'" in found["compile"]
    assert "Blokc" in found["blocks"]
    assert "this process has 4 XLA devices" in found["number"]
    assert "PJRT_DEVICE=TPU" in found["kind"]
    assert "axes replicate and shard" in found["mesh"]
