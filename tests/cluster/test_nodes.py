"""The axis of the ranks of one node, on topologies that variables describe."""

import pytest

import fxtrain as fx
from fxtrain import ops


def _env(ctx, nodes):
    """torchrun's variables of a rank; `nodes` has the node of each rank, in any order."""
    mine = [rank for rank, node in enumerate(nodes) if node == nodes[ctx.rank]]
    found = {
        "RANK": ctx.rank,
        "WORLD_SIZE": len(nodes),
        "LOCAL_RANK": mine.index(ctx.rank),
        "LOCAL_WORLD_SIZE": len(mine),
        "GROUP_RANK": nodes[ctx.rank],
        "GROUP_WORLD_SIZE": len(set(nodes)),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": 1,
    }
    return {name: str(value) for name, value in found.items()}


def _on_nodes(ctx, nodes, fn, *args, mesh=None):
    with fx.detect(_env(ctx, nodes), device="cpu", mesh=mesh) as placed:
        return fn(placed, *args)


def _facts(ctx):
    node = ctx.axis("node")
    ops.barrier(node)
    ran = ops.on_main(lambda: ctx.rank, node)
    with ops.main_first(node):
        pass
    return node.world_size, ops.gather_objects(ctx.rank, node), ran, node.is_main


@pytest.mark.parametrize(
    "nodes",
    [(0, 0), (0, 1)],
    ids=["one node", "two nodes"],
)
def test_two_ranks(pair, nodes):
    for rank, (size, ranks, ran, main) in enumerate(pair.run(_on_nodes, nodes, _facts)):
        mine = [other for other, node in enumerate(nodes) if node == nodes[rank]]
        assert (size, ranks, main) == (len(mine), mine, rank == mine[0])
        assert ran == (rank if rank == mine[0] else None)


@pytest.mark.parametrize(
    "nodes",
    [(0, 0, 1, 1), (0, 1, 0, 1), (0, 0, 0, 1), (0, 1, 2, 3)],
    ids=["even", "round robin", "uneven", "one each"],
)
def test_four_ranks(clusters, nodes):
    for rank, (size, ranks, ran, main) in enumerate(clusters[4].run(_on_nodes, nodes, _facts)):
        mine = [other for other, node in enumerate(nodes) if node == nodes[rank]]
        assert (size, ranks, main) == (len(mine), mine, rank == mine[0])
        assert ran == (rank if rank == mine[0] else None)


def _failing_main(ctx):
    node, entered = ctx.axis("node"), []
    try:
        with ops.main_first(node):
            entered.append(ctx.rank)
            if ctx.rank == 2:
                raise ValueError("no space left")
    except (ValueError, fx.CollectiveError) as error:
        return entered, str(error)
    return entered, ""


def test_a_failure_on_one_node_is_that_of_its_ranks_only(clusters):
    found = clusters[4].run(_on_nodes, (0, 0, 1, 1), _failing_main)
    assert found[0] == ([0], "") and found[1] == ([1], "")
    assert found[2] == ([2], "no space left")
    assert found[3][0] == [] and "no space left" in found[3][1]


def _shared(ctx):
    tensor, node = ctx.axis("tensor"), ctx.axis("node")
    return node.comm is tensor.comm, node.mesh.replicate


def test_an_axis_with_the_same_ranks_shares_its_groups(clusters):
    mesh = fx.Mesh(replicate=2, tensor=2)
    for shared, size in clusters[4].run(_on_mesh_of_nodes, mesh):
        assert shared and size == 2


def _on_mesh_of_nodes(ctx, mesh):
    return _on_nodes(ctx, (0, 0, 1, 1), _shared, mesh=mesh)


def test_one_rank_is_a_node():
    with fx.detect(env={}, device="cpu") as ctx:
        assert ctx.axis("node").world_size == 1
        assert ops.on_main(lambda: "once", ctx.axis("node")) == "once"
    with pytest.raises(fx.errors.ContextError):
        ops.barrier(ctx.axis("node"))
