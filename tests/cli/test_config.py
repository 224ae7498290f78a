"""Launch files: what is read, which value counts, what is written."""

import json
import re
import tomllib

import attrs
import pytest

import fxtrain as fx
from fxtrain.cli import Exit, main
from fxtrain.cli.questions import detect_machine
from fxtrain.launchers import LaunchSpec
from fxtrain.launchers.config import (
    LaunchConfig,
    find_file,
    from_flags,
    launch_config,
    read_launch_file,
    render,
    resolve,
)
from fxtrain.state import structure
from fxtrain.state.parsing import parse_text
from tests._errors import raises_code
from tests.cli._files import GOOD


@pytest.fixture
def good(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "fxtrain.toml"
    path.write_text(GOOD)
    return path


def parse(text, form):
    return launch_config(parse_text(text, form))


@attrs.frozen(kw_only=True)
class Mistake:
    """A launch file that is refused, and the line that says why."""

    text: str
    says: str
    form: str = "toml"


MISTAKES = [
    Mistake(text="[launch]\nrnks = 2", says="launch: unknown key 'rnks' (did you mean 'ranks'?)"),
    Mistake(text="[lanch]", says="the file: unknown key 'lanch' (did you mean 'launch'?)"),
    Mistake(text='[launch]\nranks = "2"', says="launch.ranks: found '2'; choose a whole number"),
    Mistake(
        text="[launch]\nranks = 0",
        says="launch.ranks: found 0; choose a whole number of",
    ),
    Mistake(text='[launch]\nlauncher = "slrm"', says="Did you mean 'slurm'?"),
    Mistake(
        text="[launch]\noptions = 3", says="launch: LaunchSpec(launcher='native', options=int("
    ),
    Mistake(
        text='[launch]\nlauncher = "mpi"\noptions = { hostfle = "x" }',
        says="launch: The launcher mpi has no option 'hostfle'. Did you mean 'hostfile'?",
    ),
    Mistake(
        text='[launch]\nlauncher = "tpu"\nrole = "x"',
        says="launch: The launcher tpu does not support role='x'",
    ),
    Mistake(text='[launch]\nlauncher = "torchrun"', says="Use launcher='native'."),
    Mistake(text='[launch]\ngpus = "0,1"', says="launch.gpus: found '0,1'; choose a list or tuple"),
    Mistake(
        text="[launch]\ngpus = [0, 1]", says="found [0, 1]; choose a list or tuple, each a string"
    ),
    Mistake(text='[launch]\nconnect_timeout_s = "30s"', says="choose a finite number"),
    Mistake(
        text='precision = "bf16"', says="the file: unknown key 'precision'. Use plan.precision."
    ),
    Mistake(text="ranks = 2", says="the file: unknown key 'ranks'. Use launch.ranks."),
    Mistake(text="[mesh]\nshard = 2", says="Use plan.mesh."),
    Mistake(
        text="compute_environment: LOCAL_MACHINE\nnum_processes: 2",
        says="This is a config of Accelerate. Convert it with `fxtrain config convert FILE`.",
        form="yaml",
    ),
    Mistake(
        text="zero_optimization: {stage: 2}",
        says="This is a config of DeepSpeed. Name it in the plan of a launch file: plan.strategy",
        form="yaml",
    ),
    Mistake(text="launch = 3", says="launch: found 3; choose a table of target, args,"),
    Mistake(text="plan = 3", says="plan: found 3; choose a table of strategy,"),
    Mistake(text="[plan]\naccumulate = 0", says="plan.accumulate: found 0"),
    Mistake(
        text='[plan.data]\nsource = "dispach"',
        says="plan.data.source: found 'dispach'",
    ),
    Mistake(text="[launch]\nranks = 1979-05-27", says="launch.ranks: found datetime.date(1979"),
    Mistake(text="[launch", says="Invalid TOML"),
    Mistake(text="a: [", says="Invalid YAML", form="yaml"),
    Mistake(text="&a {launch: *a}", says="line 1: aliases (*a) are not supported", form="yaml"),
    Mistake(text="- 1", says="the file: found [1]; choose a table of launch", form="yaml"),
    Mistake(text="1: 2", says="unknown key 1", form="yaml"),
]


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.text)
def test_a_mistake_is_told_with_its_place(mistake):
    with pytest.raises(fx.PlanError) as told:
        parse(mistake.text, mistake.form)
    assert mistake.says in str(told.value)


def test_all_mistakes_are_told_at_once_and_once():
    with pytest.raises(fx.PlanError) as told:
        parse('x = 1\n[launch]\nranks = "2"\n[plan]\nsed = 1\nflush = 1', "toml")
    places = [line.partition(": ")[0] for line in told.value.message.splitlines()]
    assert sorted(places) == ["launch.ranks", "plan", "plan.flush", "the file"]


@pytest.mark.parametrize("form", ["toml", "yaml"])
def test_depth_is_an_error(form):
    deep = "[" * 5000
    with pytest.raises(fx.PlanError):
        parse(f"x = {deep}" if form == "toml" else deep, form)


@pytest.mark.parametrize("name", ["a.toml", "a.ini", "."])
def test_a_file_that_cannot_be_read_is_an_error(name, tmp_path):
    with raises_code("FX201"):
        read_launch_file(tmp_path / name)


def test_a_file_that_is_no_text_is_an_error(tmp_path):
    (tmp_path / "a.toml").write_bytes(b"\xff\xfe")
    with raises_code("FX201"):
        read_launch_file(tmp_path / "a.toml")


def test_each_layer_wins_over_those_below(good):
    env = {"FXTRAIN_LAUNCH__RANKS": "3", "FXTRAIN_PLAN__SEED": "1", "FXTRAIN_PLAN__EVEN": "drop"}
    config = resolve(env=env, flags=from_flags(["plan.seed=2"]))
    assert config.launch.ranks == 3
    assert config.plan == fx.Plan(
        strategy=fx.DDP(bucket_mib=50.0), precision="bf16", accumulate=4, seed=2, even="drop",
        data=fx.Data(source="dispatch"),
    )  # fmt: skip
    values = config.by_path(set_only=True)
    assert values["plan.seed"] == 2 and values["plan.precision.compute"] == "bf16"
    assert values["plan.strategy.bucket_mib"] == 50.0
    assert not {"plan.strategy.static_graph", "launch.restarts"} & values.keys()
    assert config.by_path()["launch.restarts"] == 0


def test_the_options_of_one_strategy_say_nothing_about_another(good):
    config = resolve(flags=from_flags(['plan.strategy={ kind = "single" }']))
    assert config.plan.strategy == fx.Single()


@pytest.mark.parametrize("kind", ["", 'kind = "openmpi", '])
def test_the_kind_of_an_mpi_leaves_its_other_options(tmp_path, monkeypatch, kind):
    file = f'[launch]\nlauncher = "mpi"\noptions = {{ {kind}hostfile = "hosts" }}\n'
    (tmp_path / "fxtrain.toml").write_text(file)
    monkeypatch.chdir(tmp_path)
    for config in (
        resolve(env={"FXTRAIN_LAUNCH__OPTIONS__KIND": "mpich"}),
        resolve(flags=from_flags(["launch.options.kind=mpich"])),
    ):
        assert config.launch.options == {"kind": "mpich", "hostfile": "hosts"}


def test_nothing_at_all_is_the_defaults(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = resolve()
    assert config == LaunchConfig() and config.plan == fx.Plan()
    assert config.by_path(set_only=True) == {}


def test_a_wrong_value_is_told_with_the_variables(good):
    with pytest.raises(fx.PlanError) as told:
        resolve(env={"FXTRAIN_PLAN__EVEN": "dorp"}, flags=from_flags(["launch.ranks=two"]))
    first, second, third = told.value.message.splitlines()
    assert first == "With the variables FXTRAIN_PLAN__EVEN:"
    assert second.startswith("launch.ranks: found 'two'")
    assert third.startswith("plan.even: found 'dorp'")


@pytest.mark.parametrize("word", ["ranks=2", "launch.ranks", "launch..x=1", "data.x=1", "="])
def test_a_flag_that_sets_nothing_is_an_error(word):
    with raises_code("FX200", word):
        from_flags([word])


def test_which_file_counts(tmp_path, monkeypatch):
    own = tmp_path / "fxtrain" / "launch.toml"
    env = {"XDG_CONFIG_HOME": str(tmp_path)}
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    assert find_file(env) == ""
    own.parent.mkdir()
    own.touch()
    assert find_file(env) == str(own)
    assert find_file({"HOME": "/nowhere"}) == ""
    (here / "fxtrain.yaml").touch()
    assert find_file(env) == "fxtrain.yaml"
    assert find_file({**env, "FXTRAIN_CONFIG": "x.toml"}) == "x.toml"


def test_every_field_is_explained_and_offered():
    text = render({}, "toml")
    assert "Micro-batches per optimizer update." in text
    assert all(f"# {field.name}" in text for field in attrs.fields(fx.Plan) if field.name != "x")
    assert parse(text, "toml") == LaunchConfig()


def test_the_template_has_every_field_with_its_default():
    unset = {"target", "args"}  # given on the command line
    for name, cls in (("launch", LaunchSpec), ("plan", fx.Plan)):
        lines = render({}, "toml").partition(f"[{name}]\n")[2].split("\n\n")[0]
        offers = dict(re.findall(r"^# ([\w.]+) = (.+)$", lines, re.MULTILINE))
        fields = attrs.fields_dict(cls)
        assert {path.partition(".")[0] for path in offers} == fields.keys() - unset
        values = "\n".join(
            f"{path} = {value}" for path, value in offers.items() if "(" not in value
        )
        assert parse(f"[{name}]\n{values}", "toml")
        plain = tomllib.loads(values)
        base = {} if cls is fx.Plan else {"target": "train.py"}
        assert structure({**base, **plain}, cls, ()) == structure(base, cls, ())
        assert all(fields[path].default is None for path in offers if "(" in offers[path])


def test_an_offer_can_be_taken():
    text = render({}, "toml").replace("# accumulate = 1", "accumulate = 3")
    assert parse(text, "toml").plan == fx.Plan(accumulate=3)


def test_values_take_the_place_of_defaults():
    values = {
        "launch": {"options": {"partition": "gpu"}, "target": "a.py", "launcher": "slurm"},
        "plan": {"strategy": {"kind": "fsdp", "tensor": {"sequence": True}}, "clip_norm": None},
    }
    lines = render(values, "toml").splitlines()
    assert 'strategy = {kind = "fsdp", tensor = {sequence = true}}' in lines
    assert lines[:2] == ["[launch]", 'target = "a.py"'] and "# clip_norm = (not set)" in lines
    assert "# launcher" not in "\n".join(lines)
    assert parse("\n".join(lines), "toml").launch == launch_config(values).launch


def test_what_suits_a_machine(monkeypatch):
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("TPU_NAME", "pod")
    machine = detect_machine()
    assert machine.tpu and not machine.slurm


def test_default_writes_a_file_that_is_in_order(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["config", "default"]) == Exit.WELL
    assert main(["config", "check"]) == Exit.WELL
    told = capsys.readouterr().out
    assert "Use it with `fxtrain launch train.py`." in told and "fxtrain.toml is valid" in told
    before = (tmp_path / "fxtrain.toml").read_text()
    assert main(["config", "default"]) == Exit.WRONG
    assert "already exists" in capsys.readouterr().err
    assert (tmp_path / "fxtrain.toml").read_text() == before
    assert main(["config", "default", "--force", "sub/a run.yaml"]) == Exit.WELL
    told = " ".join(capsys.readouterr().out.split())
    assert "Use it with `fxtrain launch --config 'sub/a run.yaml' train.py`." in told
    assert "`fxtrain config show --config 'sub/a run.yaml'`" in told
    assert read_launch_file("sub/a run.yaml").launch.ranks == (detect_machine().count or 1)


def test_check_tells_mistakes_by_its_exit_code(good, capsys):
    good.write_text("[launch]\nrank = 2\n")
    assert main(["config", "check", "--json"]) == Exit.FOUND
    told = json.loads(capsys.readouterr().out)
    assert told["file"] == "fxtrain.toml"
    assert "did you mean 'ranks'?" in told["problems"][0] and len(told["problems"]) == 1
    assert main(["config", "check"]) == Exit.FOUND
    capsys.readouterr()
    good.write_text('[launch]\nranks = 4\n[plan.strategy]\nkind = "fsdp"\nexpert = 3\n')
    assert main(["config", "check"]) == Exit.FOUND
    assert "needs replicas of a multiple of 3 ranks, but one has 4" in capsys.readouterr().out
    assert main(["config", "check", "nowhere.toml"]) == Exit.WRONG
    assert "Traceback" not in capsys.readouterr().err


def test_show_gives_every_value(good, capsys):
    assert main(["config", "show", "--json", "--set", "plan.seed=5"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["file"] == "fxtrain.toml"
    assert told["values"]["plan.seed"] == 5 and told["values"]["plan.strategy.kind"] == "ddp"
    assert main(["config", "show", "--said"]) == 0
    shown = capsys.readouterr().out
    assert "plan.accumulate" in shown and "plan.seed" not in shown
    assert "\x1b" not in shown  # no color outside a terminal


def test_the_streams_of_ranks_are_explained():
    before = render({}, "toml").partition("show_ranks")[0].splitlines()
    assert "# show the output of these ranks of each node only" in before[-2]


@pytest.mark.parametrize("form", ["toml", "yaml", "json"])
def test_update_keeps_values_and_offers_new_fields(form, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / f"fxtrain.{form}"
    config = parse(GOOD, "toml")
    head = "" if form == "json" else "# Of our cluster.\n"
    path.write_text(head + render(config.values, form, brief=True))
    assert main(["config", "update", path.name]) == Exit.WELL
    text = path.read_text()
    assert read_launch_file(path).values == config.values
    assert text.startswith(head) and ("show_ranks" in text) == (form == "toml")
    assert main(["config", "update", path.name]) == Exit.WELL
    assert path.read_text() == text
    assert f"Updated {path.name}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "says"),
    [("[launch]\nrnks = 2\n", "did you mean 'ranks'"),
     ("compute_environment = 'LOCAL_MACHINE'\n", "fxtrain config convert"),
     ("[launch", "Invalid TOML")],
)  # fmt: skip
def test_update_leaves_a_file_that_it_cannot_read(text, says, tmp_path, capsys):
    path = tmp_path / "a.toml"
    path.write_text(text)
    assert main(["config", "update", str(path)]) == Exit.WRONG
    assert says in capsys.readouterr().err and path.read_text() == text
