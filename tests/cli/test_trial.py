"""`fxtrain test`: what it finds, on real ranks and on made-up facts."""

import json

import pytest
import torch

import fxtrain as fx
from fxtrain.cli import Exit, main
from fxtrain.diagnosis import clock_problems, fact_problems, facts_here
from fxtrain.diagnosis.trial import WITH_TENSORS, measure, trial
from tests._slow import slow_after
from tests.launched._run import FXTRAIN, run_fork

NAMES = [
    "reduce", "gather", "broadcast", "scatter", "gather_objects", "broadcast_object", "any_rank",
    "barrier",
]  # fmt: skip


def _trial(ctx, plan):
    return trial(ctx, plan, mib=0.05)


@pytest.mark.parametrize(
    "plan",
    slow_after(1, [fx.Plan(), fx.Plan(precision="bf16", accumulate=2, clip_norm=1.0)]),
    ids=["fp32", "bf16"],
)
def test_ranks_that_are_in_order(pair, plan):
    told, *others = pair.run(_trial, plan)
    assert told["problems"] == []
    assert told["ranks"] == 2
    assert [row["name"] for row in told["collectives"]] == NAMES
    assert all(row["right"] and row["latency_us"] > 0 for row in told["collectives"])
    sized = [row["name"] for row in told["collectives"] if row["gib_per_s"] is not None]
    assert sized == NAMES[:4]
    assert told["training"]["last"] < told["training"]["first"] / 2
    assert all(other["training"]["last"] == told["training"]["last"] for other in others)


def test_a_plan_that_does_not_fit_is_a_problem(pair):
    told = pair.run(_trial, fx.Plan(strategy=fx.Single()))[0]
    assert told["training"] is None
    assert told["problems"][0].startswith("The training failed: PlanError: ")


def _lying(ctx):
    """A sum that one rank gets wrong."""
    wrong = (
        lambda x, ctx: fx.ops.reduce(x, ctx, "sum") + (ctx.rank == 1),
        lambda got, *_: bool((got == 3).all()),
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(WITH_TENSORS, "reduce", wrong)
        return measure("reduce", ctx, mib=0.01)["right"]


def test_a_wrong_result_of_one_rank_is_seen_by_all(pair):
    assert pair.run(_lying) == [False, False]


HERE = facts_here({}, torch)


def test_a_build_for_gpus_without_a_gpu_computes_on_the_cpu(monkeypatch):
    def current_accelerator(check_available=False):  # noqa: FBT002 - as torch's
        return None if check_available else torch.device("cuda")

    monkeypatch.setattr(torch.accelerator, "current_accelerator", current_accelerator)
    assert facts_here({}, torch)["device"] == "cpu"


def test_this_machine_has_no_problems():
    assert fact_problems([HERE, HERE], nodes=1) == []


@pytest.mark.parametrize(
    ("other", "says"),
    [
        ({"torch": "1.0"}, f"torch differs: 1.0 on other, {torch.__version__} on"),
        ({"python": "3.0"}, "python differs"),
        ({"fxtrain": "0"}, "fxtrain differs"),
        ({"NCCL": "2.0"}, "NCCL differs: none on"),
        ({"device": "cuda"}, "device differs: cpu on"),
        ({"own_address": "127.0.1.1"}, "other resolves its own name to 127.0.1.1"),
        ({"asked": {"GLOO_SOCKET_IFNAME": "eth7"}}, "GLOO_SOCKET_IFNAME=eth7 on other"),
        ({"asked": {"NCCL_SOCKET_IFNAME": "=et"}}, "NCCL_SOCKET_IFNAME==et on other"),
    ],
)  # fmt: skip
def test_nodes_that_do_not_fit(other, says):
    mine = {**HERE, "own_address": "10.0.0.1"}
    told = fact_problems([mine, {**mine, "host": "other", **other}], nodes=2)
    assert len(told) == 1 and told[0].startswith(says)


@pytest.mark.parametrize(
    "asked",
    [{"NCCL_SOCKET_IFNAME": "et"}, {"NCCL_SOCKET_IFNAME": "^docker"},
     {"GLOO_SOCKET_IFNAME": "eth0"}, {"NCCL_SOCKET_IFNAME": "ib,eth"}],
)  # fmt: skip
def test_interfaces_that_are_there(asked):
    fact = {**HERE, "interfaces": ["lo", "eth0"], "asked": asked}
    assert fact_problems([fact], nodes=1) == []


def test_clocks():
    assert clock_problems([5.0, 5.5], ["a", "b"]) == []
    assert "of b is 7.0 s behind a" in clock_problems([9.0, 2.0], ["a", "b"])[0]


@pytest.mark.timeout(260)
def test_the_command_prints_what_ranks_found():
    words = ("test", "--ranks", "2", "--mib", "0.05", "--set", "launch.cpu=true", "--json")
    ended = run_fork(*FXTRAIN, *words, timeout_s=240.0, OMP_NUM_THREADS="1")
    assert ended.code == 0, ended.err
    told = json.loads(ended.out)
    assert (told["ranks"], told["problems"], told["launcher"]) == (2, [], "torchrun")
    assert [row["name"] for row in told["collectives"]] == NAMES


@pytest.mark.timeout(260)
def test_an_interface_that_is_not_there_is_named():
    words = ("test", "--ranks", "2", "--set", "launch.cpu=true")
    ended = run_fork(*FXTRAIN, *words, timeout_s=240.0, GLOO_SOCKET_IFNAME="nope0")
    assert ended.code == Exit.FOUND
    assert "GLOO_SOCKET_IFNAME=nope0" in ended.err


@pytest.mark.parametrize("launcher", ["kubernetes", "slurm"])
def test_launchers_from_which_nothing_comes_back(launcher, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    assert main(["test", "-n", "2", "--set", f"launch.launcher={launcher}"]) == Exit.WRONG
    assert "LaunchError" in capsys.readouterr().err
