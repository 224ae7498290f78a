"""Specs that a launcher cannot carry out: one sentence says what and why."""

import os

import attrs
import pytest

from fxtrain.errors import LaunchError
from fxtrain.launchers import LaunchSpec, MpiOptions, SlurmOptions, prepare
from fxtrain.launchers.spec import options_from
from tests._errors import raises_code
from tests.launchers._specs import HERE, SAGEMAKER, VALUE, spec_of


@attrs.frozen(kw_only=True)
class Mistake:
    """Fields of a spec that do not fit, and words of the message."""

    fields: dict
    says: str


HOSTED = {"hostfile": "hosts"}


MISTAKES = [
    Mistake(fields={"ranks": 3, "gpus": ["0", "1"]}, says="3 ranks need as many GPUs"),
    Mistake(fields={"gpus": ["zero"]}, says="expected a number or an identifier of a GPU"),
    Mistake(fields={"cpu": True, "gpus": ["0"]}, says="choose either the CPU or GPUs"),
    Mistake(
        fields={"cpu": True, "bind": "socket"}, says="For ranks on the CPU, choose one of node"
    ),
    Mistake(fields={"bind": "nodes"}, says="Did you mean 'node'?"),
    Mistake(fields={"tee": "out"}, says="Set log_dir"),
    Mistake(fields={"env": ["A"]}, says="expected NAME=VALUE"),
    Mistake(fields={"main_port": 70000}, says="choose a number from 0 to 65535"),
    Mistake(fields={"nodes": 2, "min_nodes": 3}, says="the minimum exceeds the maximum"),
    *(
        Mistake(
            fields={"nodes": 2, "main_address": "n0", "rendezvous_options": [setting], **fields},
            says=says,
        )
        for setting, fields, says in (
            ("keep_alive=5", {"rendezvous": "c10d"}, "pass one of close_timeout, heartbeat"),
            ("join_timeout=soon", {"min_nodes": 1}, "with a whole number above 0"),
            ("join_timeout=0", {"min_nodes": 1}, "with a whole number above 0"),
            ("join_timeout=5", {}, "nodes with fixed numbers have no options"),
        )
    ),
    Mistake(fields={"nodes": 2, "node_rank": 2}, says="numbered from 0 to 1"),
    Mistake(fields={"monitor_interval_s": 0}, says="choose a number from 0.001 to"),
    Mistake(fields={"threads": "4"}, says="choose a whole number or None"),
    Mistake(fields={"args": ["a\0b"]}, says="without a null character"),
    Mistake(fields={"options": {"partition": "a"}}, says="The launcher native has no option"),
    Mistake(fields={"launcher": "mpi"}, says="set the option kind to openmpi, mpich or intel"),
    Mistake(fields={"launcher": "mpi", "nodes": 2, "options": {"kind": "mpich"}}, says="hostfile"),
    Mistake(
        fields={"launcher": "mpi", "restarts": 1},
        says="The launcher mpi does not support restarts=1",
    ),
    Mistake(fields={"launcher": "mpi", "options": {"kind": "mpch"}}, says="Did you mean 'mpich'?"),
    Mistake(
        fields={"launcher": "slurm", "options": {"partitio": "a"}},
        says="has no option 'partitio'. Did you mean 'partition'?",
    ),
    Mistake(fields={"launcher": "slurm", "options": {"warn_s": "soon"}}, says="a whole number"),
    Mistake(fields={"launcher": "slurm", "options": {"requeue": "perhaps"}}, says="true or false"),
    Mistake(fields={"launcher": "slurm", "options": {"qos": "a b"}}, says="without spaces"),
    Mistake(
        fields={"launcher": "slurm", "bind": "core-complex"}, says="srun supports node, socket"
    ),
    Mistake(fields={"launcher": "slurm", "options": MpiOptions()}, says="takes a SlurmOptions"),
    Mistake(fields={"launcher": "deepspeed", "options": {"include": "a"}}, says="option hostfile"),
    Mistake(fields={"launcher": "deepspeed", "gpus": ["GPU-1a"]}, says="needs numbers of GPUs"),
    *(
        Mistake(fields={"launcher": "deepspeed", **fields}, says=says)
        for fields, says in (
            ({"options": HOSTED, "gpus": ["0"]}, "with the option include"),
            ({"options": {**HOSTED, "runner": "mpich"}}, "connect to main_address"),
            ({"options": HOSTED, "env": ['A="']}, "A: DeepSpeed's runner"),
        )
    ),
    Mistake(fields={"launcher": "tpu", "ranks": 4}, says="one process drives all chips"),
    Mistake(fields={"launcher": "tpu-pod"}, says="A TPU pod needs the option name"),
    Mistake(fields={"launcher": "kubernetes"}, says="Set the option image"),
    Mistake(fields={"launcher": "sagemaker"}, says="role and instance_type and image_uri"),
    Mistake(
        fields={"launcher": "sagemaker", "options": SAGEMAKER, "args": ["--fast"]},
        says="each once. Change '--fast'",
    ),
    Mistake(
        fields={"launcher": "sagemaker", "options": SAGEMAKER, "args": ["in.json"]},
        says="--name value only, each once. Change 'in.json'",
    ),
]


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: str(mistake.fields)[:60])
def test_what_does_not_fit_is_one_sentence(mistake):
    with pytest.raises(LaunchError) as caught:
        prepare(LaunchSpec(target="train.py", **mistake.fields), HERE)
    assert mistake.says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_deepspeeds_runner_takes_no_python_in_a_folder_with_a_space():
    spec = LaunchSpec(target="train.py", launcher="deepspeed", options=HOSTED)
    machine = attrs.evolve(HERE, python="/my envs/train/bin/python")
    with pytest.raises(LaunchError, match="cannot contain spaces, as '/my envs/train/bin/python'"):
        prepare(spec, machine)


def test_no_message_shows_a_variable():
    with raises_code("FX700", "NAME=VALUE", "'TOKEN'") as caught:
        spec_of(env=[f"OTHER={VALUE}", "TOKEN"])
    assert VALUE not in str(caught.value) + repr(spec_of(env=[f"OTHER={VALUE}"]))


def test_arguments_need_not_be_text():
    odd = os.fsdecode(b"caf\xe9")  # a file name in another encoding than UTF-8
    assert prepare(spec_of(args=[odd]), HERE).argv[-1] == odd


def test_options_are_read_from_words_by_their_types():
    words = {"requeue": "false", "warn_s": "30", "setup": "module load a", "time": "1:00"}
    found = options_from(SlurmOptions, words, launcher="slurm")
    assert found == SlurmOptions(requeue=False, warn_s=30, setup=("module load a",), time="1:00")
