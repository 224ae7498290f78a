"""Each launcher as a function: a spec and a machine to a command line, variables and files."""

import json
import os
import subprocess
from pathlib import Path

import attrs
import pytest

from fxtrain import LaunchError
from fxtrain.launch import (
    LAUNCHERS,
    DeepSpeedOptions,
    KubernetesOptions,
    LaunchSpec,
    Machine,
    MpiOptions,
    RayOptions,
    SlurmOptions,
    TpuPodOptions,
    find_launcher,
    options_from,
    prepare,
)
from fxtrain.launch.process import write_files
from tests.launch._specs import HERE, SAGEMAKER, spec_of


@attrs.frozen(kw_only=True)
class Case:
    """A spec, words that its command line holds in this order, and variables that it sets."""

    name: str
    spec: LaunchSpec
    words: str
    env: dict[str, str] = attrs.field(factory=dict)
    machine: Machine = HERE


CASES = [
    Case(
        name="native",
        spec=spec_of(ranks=2),
        words="python -m torch.distributed.run --nnodes=1 --nproc-per-node=2 "
        "--rdzv-backend=c10d --rdzv-endpoint=127.0.0.1:0 --local-addr=127.0.0.1 --no-python",
        env={"OMP_NUM_THREADS": "4"},
    ),
    Case(
        name="static",
        spec=spec_of(nodes=3, node_rank=2, main_address="n0", main_port=1234, threads=3),
        words="--nnodes=3 --rdzv-backend=static --rdzv-endpoint=n0:1234 --node-rank=2",
        env={"OMP_NUM_THREADS": "3"},
    ),
    Case(
        name="elastic",
        spec=spec_of(nodes=4, min_nodes=2, main_address="n0", restarts=3, run_id="a", role="r"),
        words="--nnodes=2:4 --rdzv-backend=c10d --rdzv-endpoint=n0:29500 --rdzv-id=a "
        "--max-restarts=3 --role=r",
        env={"OMP_NUM_THREADS": "8", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
    ),
    Case(
        name="output",
        spec=spec_of(log_dir="logs", redirect="err", tee="both", show_ranks=[0, 1], ranks=8),
        words="--log-dir=logs --redirects=2 --tee=3 --local-ranks-filter=0,1",
        env={"OMP_NUM_THREADS": "1"},
    ),
    Case(
        name="gpus",
        spec=spec_of(gpus=["2", "3"], ranks=2, bind="core-complex", monitor_interval_s=2),
        words="--monitor-interval=2 --numa-binding=core-complex --no-python",
        env={"OMP_NUM_THREADS": "4", "CUDA_VISIBLE_DEVICES": "2,3"},
    ),
    Case(
        name="cores",
        spec=spec_of(cpu=True, ranks=4, bind="exclusive"),
        words="--no-python python script --cores=0-1/2-3/4-5/6-7 -- train.py",
        env={
            "OMP_NUM_THREADS": "2",
            "CUDA_VISIBLE_DEVICES": "",
            "ONEAPI_DEVICE_SELECTOR": "*:cpu",
            "ASCEND_RT_VISIBLE_DEVICES": "",
        },
    ),
    Case(
        name="openmpi",
        spec=spec_of("mpi", ranks=2, options=MpiOptions(kind="openmpi", interface="eth0")),
        words="mpirun -np 2 --oversubscribe --map-by ppr:2:node --bind-to none "
        "btl_tcp_if_include eth0 -x OMP_NUM_THREADS -x MASTER_ADDR -x MASTER_PORT python",
        env={"OMP_NUM_THREADS": "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "4711"},
    ),
    Case(
        name="mpich",
        spec=spec_of(
            "mpi", ranks=2, nodes=2, main_address="n0", bind="exclusive",
            options=MpiOptions(hostfile="hosts", program="mpiexec"),
        ),
        words="mpiexec -np 4 -ppn 2 -f hosts -bind-to core:4 python",
        env={"OMP_NUM_THREADS": "4", "MASTER_ADDR": "n0", "MASTER_PORT": "29500"},
        machine=attrs.evolve(HERE, mpi="mpich"),
    ),
    Case(
        name="intel",
        spec=spec_of(
            "mpi", ranks=2, bind="socket",
            options=MpiOptions(kind="intel", ccl_workers=2, ccl_transport="ofi"),
        ),
        words="mpirun -np 2 -ppn 2 -genv I_MPI_PIN_DOMAIN socket python",
        env={
            "OMP_NUM_THREADS": "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "4711",
            "CCL_WORKER_COUNT": "2", "CCL_ATL_TRANSPORT": "ofi", "CCL_PROCESS_LAUNCHER": "hydra",
        },
    ),
    Case(
        name="srun",
        spec=spec_of("slurm", ranks=4, nodes=2, options=SlurmOptions(extra=["--exclusive"])),
        words="srun --nodes=2 --ntasks=8 --ntasks-per-node=4 --cpus-per-task=2 "
        "--kill-on-bad-exit=1 --exclusive python",
        env={"OMP_NUM_THREADS": "2"},
        machine=attrs.evolve(HERE, slurm_job="17"),
    ),
    Case(
        name="sbatch",
        spec=spec_of("slurm", options=SlurmOptions(file="my.sbatch")),
        words="sbatch my.sbatch",
    ),
    Case(
        name="deepspeed",
        spec=spec_of("deepspeed", ranks=2, gpus=["1", "3"], log_dir="logs"),
        words="python -u -m deepspeed.launcher.launch "
        "--world_info=eyJsb2NhbGhvc3QiOiBbMSwgM119 --master_addr=127.0.0.1 --master_port=4711 "
        "--no_local_rank script --errors=%ERRORS% -- train.py",
        env={"OMP_NUM_THREADS": "4", "CUDA_VISIBLE_DEVICES": "1,3"},
    ),
    Case(
        name="pdsh",
        spec=spec_of(
            "deepspeed", args=["--name", "a b"], env=["A=1 2"], cpu=True, main_port=1234,
            options=DeepSpeedOptions(hostfile="hosts", include="c@b:1,0", folder="/my run"),
        ),
        words="pdsh -w b,c export|DS_ACCELERATOR=cpu;|export|CUDA_VISIBLE_DEVICES='';|export|"
        "ONEAPI_DEVICE_SELECTOR='*:cpu';|export|ASCEND_RT_VISIBLE_DEVICES='';|export|A='1|2';| "
        "cd|'/my|run'; python -u -m deepspeed.launcher.launch "
        "--world_info=eyJiIjogWzAsIDFdLCAiYyI6IFswXX0= --node_rank=%n --master_addr=b "
        "--master_port=1234 --no_local_rank train.py --name 'a|b'",
        env={"PDSH_RCMD_TYPE": "ssh"},
        machine=attrs.evolve(HERE, hosts="a slots=4\nb slots=2\nc slots=1"),
    ),
    Case(
        name="first slots of the first machines",
        spec=spec_of(
            "deepspeed", ranks=2, nodes=2, executable=True, options={"hostfile": "hosts"},
        ),
        words="pdsh -w a,b --world_info=eyJhIjogWzAsIDFdLCAiYiI6IFswLCAxXX0= --no_python train.py",
        env={"PDSH_RCMD_TYPE": "ssh"},
        machine=attrs.evolve(HERE, hosts="a slots=4\nb slots=2\nc slots=1"),
    ),
    Case(
        name="one machine left",
        spec=spec_of("deepspeed", options=DeepSpeedOptions(hostfile="hosts", exclude="a:0@b")),
        words="python -u -m deepspeed.launcher.launch --world_info=eyJhIjogWzFdfQ==",
        env={"OMP_NUM_THREADS": "8"},
        machine=attrs.evolve(HERE, hosts="a slots=2\nb slots=2"),
    ),
    Case(
        name="mpirun by DeepSpeed",
        spec=spec_of(
            "deepspeed", module=True, env=["A=1 2"],
            options=DeepSpeedOptions(
                hostfile="hosts", runner="openmpi", runner_args=["--bind-to", "none"],
            ),
        ),
        words="python -m deepspeed.launcher.runner --hostfile=hosts --launcher=openmpi "
        "--launcher_args=--bind-to|none --master_addr=a --master_port=29500 --no_local_rank "
        "--module train.py",
        env={"DS_ENV_FILE": "fxtrain-launch/deepspeed.env"},
        machine=attrs.evolve(HERE, hosts="a slots=2\nb slots=2"),
    ),
    Case(
        name="tpu",
        spec=spec_of("tpu", env=["XLA_FLAGS=a b"]),
        words="python -- train.py",
        env={"PJRT_DEVICE": "TPU", "OMP_NUM_THREADS": "8", "XLA_FLAGS": "a b"},
    ),
    Case(
        name="tpu-pod",
        spec=spec_of(
            "tpu-pod", args=["a b"], env=["A=1 2"],
            options=TpuPodOptions(
                name="me@v4", zone="z", workers="0,2-3", folder="~/my run", sudo=True,
                setup=["source env.sh"],
            ),
        ),
        words="gcloud compute tpus tpu-vm ssh me@v4 --zone=z --worker=0,2-3 "
        "--command=cd|~/'my|run'|&&|source|env.sh|&&|sudo|env|PJRT_DEVICE=TPU|'A=1|2'|python3|-u"
        "|train.py|'a|b'",
    ),
    Case(
        name="ray",
        spec=spec_of("ray", ranks=2, options=RayOptions(job_server="http://h:8265", wait=False)),
        words="ray job submit --address=http://h:8265 --working-dir=. --no-wait -- python -m "
        "fxtrain.launch.launchers.ray.driver fxtrain-launch/ray.json",
    ),
    Case(
        name="kubernetes",
        spec=spec_of("kubernetes", options=KubernetesOptions(image="i", name="run-1")),
        words="kubectl apply -f fxtrain-launch/run-1.json",
    ),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_command_line(case):
    found = prepare(case.spec, case.machine)
    words = list(found.argv)
    for word in case.words.split():
        wanted = word.replace("|", " ")
        assert wanted in words, f"{wanted} is not in {found.argv}, or not in this place"
        words = words[words.index(wanted) + 1 :]
    assert dict(found.env) == case.env


def test_every_launcher_has_a_case():
    assert {case.spec.launcher for case in CASES} | {"sagemaker"} == set(LAUNCHERS)


def test_deepspeeds_runner_reads_variables_from_a_file():
    (case,) = (case for case in CASES if case.name == "mpirun by DeepSpeed")
    assert prepare(case.spec, case.machine).files == {
        "fxtrain-launch/deepspeed.env": "MASTER_ADDR=a\nMASTER_PORT=29500\nA=1 2\n"
    }


def test_a_secret_goes_to_other_machines_by_its_name():
    machine = attrs.evolve(HERE, mpi="openmpi", port=4711, chosen=("FXTRAIN_RUN_SECRET",))
    words = prepare(spec_of("mpi", ranks=2, options=MpiOptions()), machine).argv
    assert words[words.index("FXTRAIN_RUN_SECRET") - 1] == "-x"


def test_a_batch_file_is_a_program_of_the_shell(tmp_path):
    options = SlurmOptions(
        partition="gpu", time="1:00:00", gpus_per_node="8", warn_s=60, setup=["module load cuda"],
        extra=["--exclusive"],
    )  # fmt: skip
    spec = spec_of("slurm", ranks=8, nodes=2, env=["A=it's"], options=options)
    invocation = prepare(spec, attrs.evolve(HERE, folder="/my run"))
    (text,) = invocation.files.values()
    # A value is in the environment of sbatch, and not in the file.
    assert dict(invocation.env) == {"A": "it's"} and "it'" not in text
    assert invocation.argv[:2] == ("sbatch", "--export=ALL,A")
    for line in (
        "#SBATCH --nodes=2", "#SBATCH --ntasks-per-node=8", "#SBATCH --partition=gpu",
        "#SBATCH --time=1:00:00", "#SBATCH --gpus-per-node=8", "#SBATCH --requeue",
        "#SBATCH --signal=B:USR1@60", "#SBATCH --exclusive", "cd '/my run'",
        "module load cuda",
    ):  # fmt: skip
        assert line in text.splitlines()
    made = next(line for line in text.splitlines() if "/dev/urandom" in line)
    shown = f"{made}; printenv FXTRAIN_RUN_SECRET"
    env = {"PATH": os.environ["PATH"]}  # without a secret that a launch in this process left
    first, second = (
        subprocess.check_output(["bash", "-c", shown], text=True, env=env) for _ in "12"
    )
    assert len(first.strip()) == 64 and first != second
    path = tmp_path / "job.sbatch"
    path.write_text(text)
    assert subprocess.run(["bash", "-n", str(path)], check=False).returncode == 0


@pytest.mark.parametrize(
    ("extra", "says"),
    [((), "ALL,A"), (("--export=NONE",), "A"), (("--export=B,C", "--exclusive"), "B,C,A")],
)
def test_a_batch_job_takes_variables_by_name(extra, says):
    spec = spec_of("slurm", env=["A=1"], options=SlurmOptions(extra=extra))
    assert prepare(spec, HERE).argv[1] == f"--export={says}"


VALUE = "s3cr3t-value"
WITH_FILES = {
    "slurm": {},
    "kubernetes": {"image": "me/train:1"},
    "ray": {},
    "sagemaker": {"role": "me", "instance_type": "ml.g5.xlarge", "image_uri": "i"},
}


@pytest.mark.parametrize("launcher", WITH_FILES)
def test_files_are_for_this_user_only(launcher, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    spec = spec_of(launcher, env=[f"TOKEN={VALUE}"], options=WITH_FILES[launcher])
    invocation = prepare(spec, HERE)
    (path,) = map(Path, invocation.files)
    path.parent.mkdir(exist_ok=True)
    path.write_text("an older one, which everybody can read")
    path.chmod(0o644)
    write_files(invocation)
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.read_text() == invocation.files[str(path)]
    assert (VALUE in path.read_text()) == (launcher != "slurm")


def test_keys_of_a_secret_become_variables():
    spec = spec_of("kubernetes", options={"image": "i", "secrets": ["keys"]})
    (text,) = prepare(spec, HERE).files.values()
    assert '{"secretRef": {"name": "keys"}}' in json.dumps(json.loads(text))


@attrs.frozen(kw_only=True)
class Mistake:
    """Fields of a spec that do not fit, and words of the message."""

    fields: dict
    says: str


TWO = attrs.evolve(HERE, hosts="a slots=2\nb slots=1")
HOSTED = {"hostfile": "hosts"}
MISTAKES = [
    Mistake(fields={"launcher": "slurn"}, says="No launcher 'slurn'. Did you mean 'slurm'"),
    Mistake(fields={"nodes": 2}, says="2 nodes need an address to connect to"),
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
    Mistake(fields={"nodes": 2, "node_rank": 2}, says="numbered from 0 to 1"),
    Mistake(fields={"module": True, "executable": True}, says="a program cannot be both"),
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
            ({"options": {**HOSTED, "include": "a"}, "nodes": 2}, "Omit ranks and nodes"),
            ({"options": HOSTED, "nodes": 3}, "the hostfile only has a, b"),
            ({"options": HOSTED, "ranks": 2}, "fewer slots for b"),
            ({"options": {**HOSTED, "include": "c"}}, "the hostfile has a, b"),
            ({"options": {**HOSTED, "runner_args": ["-x"]}}, "Omit it"),
            ({"options": {**HOSTED, "runner": "mpich", "exclude": "a:0"}}, "uses the whole host"),
            ({"options": {**HOSTED, "runner": "slurm"}, "env": ['A="']}, "A: DeepSpeed's runner"),
        )
    ),
    Mistake(fields={"launcher": "tpu", "ranks": 4}, says="one process drives all chips"),
    Mistake(fields={"launcher": "tpu-pod"}, says="A TPU pod needs the option name"),
    Mistake(fields={"launcher": "kubernetes"}, says="Set the option image"),
    Mistake(fields={"launcher": "sagemaker"}, says="role and instance_type and image_uri"),
    Mistake(
        fields={"launcher": "sagemaker", "options": SAGEMAKER, "args": ["--fast"]},
        says="--fast has no value",
    ),
    Mistake(
        fields={"launcher": "sagemaker", "options": SAGEMAKER, "args": ["in.json"]},
        says="--name value only, found 'in.json'",
    ),
]


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: str(mistake.fields)[:60])
def test_what_does_not_fit_is_one_sentence(mistake):
    with pytest.raises(LaunchError) as caught:
        prepare(LaunchSpec(target="train.py", **mistake.fields), TWO)
    assert mistake.says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_no_message_shows_a_variable():
    with pytest.raises(LaunchError, match="expected NAME=VALUE, found 'TOKEN'") as caught:
        spec_of(env=[f"OTHER={VALUE}", "TOKEN"])
    assert VALUE not in str(caught.value) + repr(spec_of(env=[f"OTHER={VALUE}"]))


def test_arguments_need_not_be_text():
    odd = os.fsdecode(b"caf\xe9")  # a file name in another encoding than UTF-8
    assert prepare(spec_of(args=[odd]), HERE).argv[-1] == odd


def test_options_are_read_from_words_by_their_types():
    words = {"requeue": "no", "warn_s": "30", "setup": "module load a", "time": "1:00"}
    found = options_from(SlurmOptions, words, launcher="slurm")
    assert found == SlurmOptions(requeue=False, warn_s=30, setup=("module load a",), time="1:00")


def test_every_field_of_a_spec_is_somebodys():
    used = {field.name for field in attrs.fields(LaunchSpec)}
    assert all(row.uses <= used for row in LAUNCHERS.values())
    assert find_launcher(spec_of()).uses == used
