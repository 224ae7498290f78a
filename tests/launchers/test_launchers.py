"""Each launcher as a function: a spec and a machine to a command line, variables and files."""

import json
import sys

import attrs
import pytest

from fxtrain.cli import Exit, main
from fxtrain.launchers import (
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
    prepare,
)
from tests.cluster._models import PIPELINES
from tests.launched._run import ROOT
from tests.launchers._specs import HERE, spec_of


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
        name="cores",
        spec=spec_of(cpu=True, ranks=4, bind="exclusive"),
        words="--no-python python script --cores=0,1/2,3/4,5/6,7 -- train.py",
        env={
            "OMP_NUM_THREADS": "2",
            "CUDA_VISIBLE_DEVICES": "",
            "ONEAPI_DEVICE_SELECTOR": "*:cpu",
            "ASCEND_RT_VISIBLE_DEVICES": "",
        },
    ),
    Case(
        name="openmpi",
        spec=spec_of("mpi", ranks=2, options=MpiOptions(kind="openmpi", extra=["-v"])),
        words="mpirun -np 2 --oversubscribe --map-by ppr:2:node --bind-to none "
        "-x OMP_NUM_THREADS -x MASTER_ADDR -x MASTER_PORT -v python",
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
        name="machines of a hostfile",
        spec=spec_of(
            "deepspeed", ranks=2, nodes=2, executable=True, cpu=True, main_port=1234,
            options=DeepSpeedOptions(hostfile="hosts"),
        ),
        words="python -m deepspeed.launcher.runner --hostfile=hosts --num_nodes=2 "
        "--num_gpus=2 --launcher=pdsh --master_port=1234 --no_local_rank "
        "--no_python train.py",
        env={"DS_ENV_FILE": "fxtrain-launch/deepspeed.env"},
    ),
    Case(
        name="mpirun by DeepSpeed",
        spec=spec_of(
            "deepspeed", module=True, env=["A=1 2"], main_address="a",
            options=DeepSpeedOptions(
                hostfile="hosts", runner="openmpi", runner_args=["--bind-to", "none"],
            ),
        ),
        words="python -m deepspeed.launcher.runner --hostfile=hosts --launcher=openmpi "
        "--launcher_args=--bind-to|none --master_addr=a --master_port=29500 --no_local_rank "
        "--no_ssh_check --module train.py",
        env={"DS_ENV_FILE": "fxtrain-launch/deepspeed.env"},
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
        "fxtrain.launchers.built_in.ray_driver fxtrain-launch/ray.json",
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


def test_keys_of_a_secret_become_variables():
    spec = spec_of("kubernetes", options={"image": "i", "secrets": ["keys"]})
    (text,) = prepare(spec, HERE).files.values()
    assert '{"secretRef": {"name": "keys"}}' in json.dumps(json.loads(text))


def test_every_field_of_a_spec_is_somebodys():
    used = {field.name for field in attrs.fields(LaunchSpec)}
    assert all(row.uses <= used for row in LAUNCHERS.values())
    assert find_launcher(spec_of()).uses == used


def _manifest():
    options = KubernetesOptions(
        image="me/train:1", gpus=8, memory="64Gi", shared_memory="8Gi", claims=["data:/data"],
        node_selector=["pool=a"], folder="/app", namespace="ml", service_account="me",
    )  # fmt: skip
    spec = spec_of(
        "kubernetes", ranks=8, nodes=3, args=["$(HOME)"], env=["A=$(B)"], restarts=2,
        options=options,
    )  # fmt: skip
    (text,) = prepare(spec, HERE).files.values()
    return json.loads(text)


def _check_pod(pod, place):
    (container,) = pod["containers"]
    assert container["command"] == ["python", "-m", "fxtrain", "launch"]
    words = [*place, "--ranks=8", "--nodes=3", "--", "train.py", "$$(HOME)"]
    assert container["args"] == words
    assert container["env"] == [{"name": "A", "value": "$$(B)"}]
    assert container["resources"]["limits"] == {"memory": "64Gi", "nvidia.com/gpu": "8"}
    assert {mount["mountPath"] for mount in container["volumeMounts"]} == {"/data", "/dev/shm"}
    assert (pod["restartPolicy"], pod["serviceAccountName"]) == ("Never", "me")
    assert pod["nodeSelector"] == {"pool": "a"}


def test_jobset():
    found = _manifest()
    assert (found["apiVersion"], found["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    assert found["metadata"] == {"name": "train", "namespace": "ml"}
    assert found["spec"]["failurePolicy"] == {"maxRestarts": 2}
    (group,) = found["spec"]["replicatedJobs"]
    job = group["template"]["spec"]
    assert (job["parallelism"], job["completions"], job["completionMode"]) == (3, 3, "Indexed")
    place = ["--node-rank=$(JOB_COMPLETION_INDEX)", "--main-address=train-node-0-0.train"]
    _check_pod(job["template"]["spec"], [*place, "--main-port=29500"])


FILES = sorted((ROOT / "examples" / "configs").iterdir())
PRETRAIN = sorted((ROOT / "examples" / "pretrain" / "plans").iterdir())


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(
            path, id=path.stem, marks=[PIPELINES] if path.stem in ("pipeline", "pp") else []
        )
        for path in (*FILES, *PRETRAIN)
    ],
)
def test_each_is_valid_and_starts(path, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "deepspeed", None)  # which looks for a GPU when imported
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    assert main(["config", "check", str(path)]) == Exit.WELL, capsys.readouterr().out
    assert main(["launch", "--config", str(path), "--dry", "train.py"]) == 0
    assert "train.py" in capsys.readouterr().out


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_each_says_how_to_start_it_and_is_listed(path):
    start = f"#     fxtrain launch --config examples/configs/{path.name} "
    assert start in path.read_text()
    assert f"](configs/{path.name})" in (ROOT / "examples" / "README.md").read_text()
    assert f"](../examples/configs/{path.name})" in (ROOT / "docs" / "launching.md").read_text()
