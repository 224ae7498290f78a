"""Bulk collectives: which bytes are copied, and in how many pieces trees are sent."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fxtrain import ops
from fxtrain.ops import collectives
from fxtrain.testing import count_collectives

MIB = 2**20


class _Allocated(TorchDispatchMode):
    """Counts the bytes of new storages of the CPU, each once."""

    def __init__(self):
        super().__init__()
        self.bytes, self._kept = 0, {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = {t.untyped_storage().data_ptr() for t in args if isinstance(t, torch.Tensor)}
        out = func(*args, **(kwargs or {}))
        for made in out if isinstance(out, list | tuple) else [out]:
            if isinstance(made, torch.Tensor) and made.device.type == "cpu":
                storage = made.untyped_storage()
                if storage.data_ptr() not in given and storage.data_ptr() not in self._kept:
                    self._kept[storage.data_ptr()] = storage  # so that no address is reused
                    self.bytes += storage.nbytes()
        return out


def _allocated(ctx, op):
    x = torch.full((8 * MIB // 4,), float(ctx.rank + 1))
    with _Allocated() as seen:
        out = op(x, ctx)
    return seen.bytes / MIB, float(out.sum()), float(x[0])


def _both(ctx):
    return {op.__name__: _allocated(ctx, op) for op in (ops.gather, ops.reduce, ops.broadcast)}


def test_one_large_tensor_is_copied_into_its_result_only(pair):
    n = 8 * MIB // 4
    for rank, found in enumerate(pair.run(_both)):
        values = {"gather": 3.0 * n, "reduce": 1.5 * n, "broadcast": 1.0 * n}
        assert {name: row[1] for name, row in found.items()} == values
        assert all(row[2] == rank + 1 for row in found.values())
        megabytes = {name: row[0] for name, row in found.items()}
        assert megabytes == pytest.approx({"gather": 16, "reduce": 8, "broadcast": 8}, abs=0.1)


def _pieces(ctx):
    tree = [torch.arange(5) + ctx.rank, torch.ones(3, dtype=torch.bool), torch.tensor(ctx.rank)]
    tree += [torch.full((40, 2), 1.5 + ctx.rank), torch.empty(0, 4), torch.arange(3.0)[1:] * 1j]
    whole, sent = [], []

    def gather(piece, group):
        return collectives.gather_piece(piece, ctx.world_size, group)

    def send(piece, group):
        return collectives.broadcast_piece(piece, 1, group, sends=ctx.rank == 1)

    for most in (1, 64, collectives.PIECE_BYTES):
        with pytest.MonkeyPatch.context() as patch, count_collectives() as traffic:
            patch.setattr(collectives, "PIECE_BYTES", most)
            whole.append(collectives.in_pieces(ctx, ("gather", ""), tree, gather, joined=True))
            rows = collectives.in_pieces(ctx, ("broadcast", ""), tree, send)
            sent.append([row[0] for row in rows])
            number = len(collectives.pieces(tree))
        assert traffic.counts == {"broadcast": number, "all_gather": number}
    for other in range(2):
        torch.testing.assert_close(whole[other], whole[2], rtol=0, atol=0)
        torch.testing.assert_close(sent[other], sent[2], rtol=0, atol=0)
    return whole[2][0].tolist(), sent[2][0].tolist(), sent[2][2].item(), whole[2][2].tolist()


def test_pieces_of_any_size_give_the_same_values(pair):
    rows = [0, 1, 2, 3, 4, 1, 2, 3, 4, 5]
    assert pair.run(_pieces) == [(rows, [1, 2, 3, 4, 5], 1, [0, 1])] * 2


def test_pieces_keep_the_order_and_their_limit(monkeypatch):
    monkeypatch.setattr(collectives, "PIECE_BYTES", 31)
    tensors = [torch.empty(n, dtype=torch.uint8, device="meta") for n in (0, 10, 20, 100, 0, 30, 1)]
    assert collectives.pieces(tensors) == [[0, 1, 2], [3], [4, 5, 6]]
    assert collectives.pieces([]) == []
    tensors[1] = tensors[1].char()
    assert collectives.pieces(tensors) == [[0, 2], [1], [3], [4, 5, 6]]
