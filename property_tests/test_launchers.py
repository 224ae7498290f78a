"""Launchers under any arguments: quoting comes back, and variables are only those meant."""

import json
import math
import os
import re
import shlex
import subprocess

import attrs
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch.distributed import run as torch_run

from fxtrain.cli.launch_command import LAUNCH, spec_of
from fxtrain.errors import escape_unprintable
from fxtrain.launchers import (
    KubernetesOptions,
    LaunchSpec,
    Machine,
    MpiOptions,
    SlurmOptions,
    TpuPodOptions,
    prepare,
    show,
)
from fxtrain.launchers.config import launch_config, render
from fxtrain.launchers.machine import cores_of_ranks
from fxtrain.launchers.spec import FLAGS, flag_words
from fxtrain.state import unstructure
from fxtrain.state.parsing import parse_text

HERE = Machine(python="/opt/my python/bin/python", cores=range(6), port=4711, folder="/my run")


# Anything that a command line can hold, and often what shells and launchers take as theirs.
_odd = st.sampled_from(list(" '\"$\\`;&|<>(){}*?!#~%\n\t=,:-"))
words = st.text(
    _odd | st.characters(exclude_categories=("Cs",), exclude_characters="\0"), max_size=12
)
variables = st.dictionaries(st.from_regex(r"\AMY_[A-Z0-9_]{0,5}\Z"), words, max_size=3)
OPTIONS = {
    "native": None,
    "mpi": MpiOptions(kind="openmpi"),
    "slurm": SlurmOptions(),
    "deepspeed": None,
    "tpu": None,
    "tpu-pod": TpuPodOptions(name="v4"),
    "ray": None,
    "kubernetes": KubernetesOptions(image="i"),
}
OURS = {
    "native": {"OMP_NUM_THREADS"},
    "mpi": {"OMP_NUM_THREADS", "MASTER_ADDR", "MASTER_PORT"},
    "slurm": {"OMP_NUM_THREADS"},
    "deepspeed": {"OMP_NUM_THREADS"},
    "tpu": {"OMP_NUM_THREADS", "PJRT_DEVICE"},
    "tpu-pod": set(),
    "ray": set(),
    "kubernetes": set(),
}


@st.composite
def specs(draw, launcher=None):
    name = launcher or draw(st.sampled_from(sorted(OPTIONS)))
    return LaunchSpec(
        target="train.py",
        args=draw(st.lists(words, max_size=4)),
        launcher=name,
        options=OPTIONS[name],
        ranks=1 if name.startswith("tpu") else draw(st.integers(1, 8)),
        env=[f"{key}={value}" for key, value in draw(variables).items()],
    )


def _env(spec):
    return dict(pair.split("=", 1) for pair in spec.env)


def _words_of(line):
    """The words of a line as bash reads them."""
    bash = ["bash", "-c", f"printf '%s\\0' {line}"]
    printed = subprocess.run(bash, env={"LC_ALL": "C.UTF-8"}, capture_output=True, check=True)
    return printed.stdout.decode().split("\0")[:-1]


@given(spec=specs(), in_a_job=st.booleans())
def test_what_is_shown_reads_back_as_what_is_run(spec, in_a_job):
    machine = attrs.evolve(HERE, slurm_job="1" if in_a_job else "")
    found = prepare(spec, machine)
    words = [*(f"{name}={value}" for name, value in found.env.items()), *found.argv]
    shown = show(attrs.evolve(found, files={}))
    assert shown == escape_unprintable(shown)
    assert _words_of(shown) == words


@given(spec=specs())
def test_the_program_gets_its_arguments_and_only_meant_variables(spec):
    machine = attrs.evolve(HERE, slurm_job="1")
    found = prepare(spec, machine)
    if spec.launcher in ("native", "mpi", "slurm", "deepspeed", "tpu"):
        given_words = found.argv[found.argv.index("--") + 1 :]
        if spec.launcher == "native":  # torch replaces ${...} and takes $$ as $
            given_words = [word.replace("$$", "$") for word in given_words]
        assert list(given_words) == ["train.py", *spec.args]
        assert dict(found.env) == _env(spec) | {
            name: found.env[name] for name in OURS[spec.launcher]
        }
    else:
        assert dict(found.env) == {}


@settings(deadline=None, max_examples=25)
@given(spec=specs("slurm"))
def test_a_batch_file_gives_the_shell_what_was_meant(spec):
    found = prepare(spec, HERE)
    (text,) = found.files.values()
    names = " ".join(f'"${name}"' for name in _env(spec))
    # The shell itself reads the file, with functions in the place of SLURM and of cd.
    stand_ins = f"cd() {{ :; }}\nsrun() {{ printf '%s\\0' \"$@\" {names}; }}\n"
    done = subprocess.run(
        ["bash", "-c", stand_ins + text],
        env={**os.environ, **found.env},  # sbatch gives the job its own
        capture_output=True,
        check=False,
        timeout=20,
    )
    assert done.returncode == 0, done.stderr
    got = done.stdout.decode().split("\0")[:-1]
    wanted = ["--", "train.py", *spec.args, *_env(spec).values()]
    assert got[len(got) - len(wanted) :] == wanted


@given(spec=specs("tpu-pod"))
def test_the_hosts_of_a_pod_get_what_was_meant(spec):
    command = prepare(spec, HERE).argv[-1].removeprefix("--command=")
    wanted = ["env", "PJRT_DEVICE=TPU", *spec.env, "python3", "-u", "train.py", *spec.args]
    assert shlex.split(command) == wanted


def _kubelet(text, env):
    """What Kubernetes makes of a word of a container: $(NAME) is replaced, $$ is $."""
    return re.sub(r"\$\$|\$\((\w+)\)", lambda m: "$" if m[1] is None else env.get(m[1], m[0]), text)


@given(spec=specs("kubernetes"))
@example(
    spec=LaunchSpec(
        target="t.py", args=["$(A)"], launcher="kubernetes", options=OPTIONS["kubernetes"]
    )
)
def test_pods_get_what_was_meant(spec):
    (text,) = prepare(spec, HERE).files.values()
    (group,) = json.loads(text)["spec"]["replicatedJobs"]
    (container,) = group["template"]["spec"]["template"]["spec"]["containers"]
    got = [_kubelet(word, {"A": "replaced"}) for word in container["args"]]
    assert got[got.index("--") + 1 :] == [spec.target, *spec.args]
    env = {one["name"]: _kubelet(one["value"], {}) for one in container.get("env", [])}
    assert env == _env(spec)


@st.composite
def native_specs(draw):
    some = st.sampled_from
    nodes = draw(st.integers(1, 4))
    min_nodes = draw(st.none() | st.integers(1, nodes))
    rendezvous = draw(some([None, "static", "c10d"]))
    c10d = rendezvous == "c10d" or (rendezvous is None and (nodes == 1 or min_nodes))
    settings_of_c10d = some([(), ("close_timeout=3",), ("close_timeout=3", "last_call_timeout=7")])
    gpus = draw(st.lists(st.integers(0, 9).map(str), max_size=3, unique=True))
    restarts = draw(st.integers(0, 3))
    names = st.from_regex(r"\A[a-z0-9._-]{0,6}\Z")
    return LaunchSpec(
        target="train.py",
        args=draw(st.lists(words, max_size=3)),
        ranks=draw(st.integers(1, len(gpus) or 8)),
        nodes=nodes,
        min_nodes=min_nodes,
        node_rank=draw(st.integers(0, nodes - 1)),
        main_address="n0",
        main_port=draw(st.integers(0, 65_535)),
        local_address=draw(some(["", "n7"])),
        rendezvous=rendezvous,
        rendezvous_options=draw(settings_of_c10d) if c10d else (),
        connect_timeout_s=draw(some([0.3, 7, 600])),
        run_id=draw(names),
        restarts=restarts,
        spares=draw(st.integers(0, 2)) if restarts else 0,
        monitor_interval_s=draw(some([0.1, 2, 30.5])),
        shutdown_s=draw(st.integers(0, 99)),
        role=draw(names.filter(bool)),
        log_dir="logs",
        redirect=draw(some(["none", "out", "err", "both"])),
        tee=draw(some(["none", "out", "err", "both"])),
        show_ranks=draw(st.lists(st.integers(0, 7), max_size=2)),
        gpus=gpus,
        cpu=not gpus and draw(st.booleans()),
        threads=draw(st.none() | st.integers(1, 8)),
        bind=draw(some(["none", "node", "exclusive"])),
        env=[f"{key}={value}" for key, value in draw(variables).items()],
        module=False,
    )


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(spec=native_specs())
def test_a_spec_as_flags_reads_back_as_the_spec(spec, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    (tmp_path / "train.py").touch()
    given_words = list(flag_words(spec))
    if "--ranks=1" not in given_words and spec.ranks == 1:
        given_words.insert(0, "--ranks=1")  # which is not the default where there are GPUs
    options = LAUNCH.make_context("launch", given_words).params
    assert spec_of(options) == spec


@given(spec=native_specs(), form=st.sampled_from(["toml", "yaml", "json"]))
def test_a_spec_in_a_launch_file_reads_back_as_the_spec(spec, form):
    text = render({"launch": unstructure(spec)}, form, brief=True)
    assert launch_config(parse_text(text, form)).launch == spec


# torch 2.9 has no such option.
_HAS_SHUTDOWN = "--shutdown-timeout" in torch_run.get_args_parser().format_help()
STREAMS = {"none": "0", "out": "1", "err": "2", "both": "3"}


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(spec=native_specs())
def test_torch_reads_the_command_line_as_the_spec(spec, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # where torch makes the folder of the output
    found = prepare(spec, HERE)
    parser, given_words = torch_run.get_args_parser(), found.argv[3:]
    if not _HAS_SHUTDOWN:  # the launcher leaves it out, too
        given_words = [word for word in given_words if not word.startswith("--shutdown-timeout=")]
    args = parser.parse_args(given_words)
    config, program, words = torch_run.config_from_args(args)
    fewest = spec.nodes if spec.min_nodes is None else spec.min_nodes
    assert (config.min_nodes, config.max_nodes) == (fewest, spec.nodes)
    assert (config.nproc_per_node, config.max_restarts) == (spec.ranks, spec.restarts)
    host = "127.0.0.1" if spec.nodes == 1 else "n0"
    assert config.rdzv_endpoint == f"{host}:{spec.port}"
    assert (config.local_addr or "") == (spec.local_address or host * (spec.nodes == 1))
    assert config.rdzv_backend == spec.rendezvous_backend
    wait_s = str(math.ceil(spec.connect_timeout_s))  # torch's rendezvous takes whole seconds
    if spec.rendezvous_backend == "static":
        wanted = {"timeout": wait_s, "rank": spec.node_rank}
    else:
        options = dict(option.split("=") for option in spec.rendezvous_options)
        wanted = {"join_timeout": wait_s, **options}
    assert config.rdzv_configs.items() >= wanted.items()
    assert (config.run_id, config.role) == (spec.run_id or "fxtrain", spec.role)
    assert config.monitor_interval == spec.monitor_interval_s
    assert not _HAS_SHUTDOWN or args.shutdown_timeout == spec.shutdown_s
    assert (args.log_dir, args.redirects, args.tee) == (
        "logs", STREAMS[spec.redirect], STREAMS[spec.tee]
    )  # fmt: skip
    assert args.local_ranks_filter == ",".join(map(str, spec.show_ranks))
    assert (args.numa_binding or "none") == ("none" if spec.cpu else spec.bind)
    assert ("TORCH_DISABLE_SHARE_RDZV_TCP_STORE" in found.env) == spec.elastic
    assert found.env.get("CUDA_VISIBLE_DEVICES") == (
        "" if spec.cpu else ",".join(spec.gpus) or None
    )
    assert spec.threads is None or found.env["OMP_NUM_THREADS"] == str(spec.threads)
    words = [program, *words]
    mine = [word.replace("$$", "$") for word in words[words.index("--") + 1 :]]
    assert mine == [spec.target, *spec.args]


def test_every_field_has_a_flag():
    without = {"target", "args", "options"}
    fields = {field.name for field in attrs.fields(LaunchSpec)} - without
    assert fields == {flag.field for flag in FLAGS}
    assert len({flag.flag for flag in FLAGS}) == len(FLAGS)


@given(ranks=st.integers(1, 20), sizes=st.lists(st.integers(1, 6), min_size=1, max_size=4))
def test_cores_are_shared_out(ranks, sizes):
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    numa = tuple(tuple(range(a, a + n)) for a, n in zip(starts, sizes, strict=True))
    machine = Machine(cores=range(sum(sizes)), numa=numa)
    shares = cores_of_ranks("exclusive", ranks, machine)
    assert len(shares) == ranks and all(shares)
    assert {core for share in shares for core in share} <= set(machine.cores)
    if ranks <= sum(sizes):  # every core belongs to one rank, as evenly as it goes
        assert sorted(core for share in shares for core in share) == list(machine.cores)
        assert max(map(len, shares)) - min(map(len, shares)) <= 1
    assert set(cores_of_ranks("node", ranks, machine)) <= set(numa)
