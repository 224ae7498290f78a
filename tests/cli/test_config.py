"""Launch files: what is read, which value counts, what is written."""

import json
import re
import tomllib

import attrs
import pytest

import fxtrain as fx
from fxtrain.cli import Exit, main
from fxtrain.launchers import LaunchSpec
from fxtrain.launchers.config import (
    LaunchFile,
    Machine,
    detect_machine,
    find_file,
    from_flags,
    parse,
    read_launch_file,
    render,
    resolve,
    suggested,
)
from fxtrain.state import structure
from tests.cli._files import GOOD


@pytest.fixture
def good(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "fxtrain.toml"
    path.write_text(GOOD)
    return path


def test_a_profile_changes_the_common_values():
    big = parse(GOOD, "toml").section("big")
    assert big.launch == {"ranks": 8}
    assert big.plan["accumulate"] == 4 and big.plan["precision"] == "bf16"


def test_the_options_of_one_strategy_say_nothing_about_another():
    assert parse(GOOD, "toml").section("small").plan["strategy"] == {"kind": "single"}


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
    Mistake(text="[launch]\noptions = 3", says="launch.options: expected a table, found 3"),
    Mistake(
        text='[launch]\nlauncher = "mpi"\noptions = { hostfle = "x" }',
        says="launch.options: The launcher mpi has no option 'hostfle'. Did you mean 'hostfile'?",
    ),
    Mistake(
        text='[launch]\nlauncher = "tpu"\nrole = "x"',
        says="launch: The launcher tpu does not support role='x'",
    ),
    Mistake(text='[launch]\nlauncher = "torchrun"', says="Use launcher='native'."),
    Mistake(
        text='[launch]\nlauncher = "slurm"\npartition = "x"',
        says="launch: unknown key 'partition'. Options of the launcher slurm belong in launch.opt",
    ),
    Mistake(text='[launch]\ngpus = "0,1"', says="launch.gpus: found '0,1'; choose a list or tuple"),
    Mistake(text="[launch]\ngpus = [0, 1]", says="each a string. Write ['0', '1']."),
    Mistake(text='[launch]\nconnect_timeout_s = "30s"', says="Write the number of seconds alone."),
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
    Mistake(text="launch = 3", says="launch: found 3; choose a table."),
    Mistake(text='default = "a"', says="default: no profile 'a'; the file has none"),
    Mistake(text="default = 1", says="default: found 1; choose a string."),
    Mistake(text="profiles = 1", says="profiles: found 1; choose a table of profiles."),
    Mistake(
        text="[profiles.a]\nx = 1", says="profiles.a: unknown key 'x'; Section has launch, plan."
    ),
    Mistake(text="[plan]\naccumulate = 0", says="plan.accumulate: found 0"),
    Mistake(
        text='[profiles.a.plan.data]\nsource = "dispach"',
        says="profiles.a.plan.data.source: found 'dispach'",
    ),
    Mistake(text="[launch]\nranks = 1979-05-27", says="launch.ranks: found datetime.date(1979"),
    Mistake(text="[launch", says="Invalid TOML"),
    Mistake(text="a: [", says="Invalid YAML", form="yaml"),
    Mistake(text="&a {launch: *a}", says="contains itself through an alias", form="yaml"),
    Mistake(text="- 1", says="the file: found [1]; choose a table of default", form="yaml"),
    Mistake(text="1: 2", says="unknown key 1", form="yaml"),
    Mistake(text="profiles: {'': {}}", says="choose a word as the name", form="yaml"),
]


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.text)
def test_a_mistake_is_told_with_its_place(mistake):
    with pytest.raises(fx.PlanError) as told:
        parse(mistake.text, mistake.form)
    assert mistake.says in str(told.value)


def test_all_mistakes_are_told_at_once_and_once():
    with pytest.raises(fx.PlanError) as told:
        parse('[launch]\nranks = "2"\n[plan]\nsed = 1\n[profiles.a.plan]\nflush = 1', "toml")
    places = [line.partition(": ")[0] for line in str(told.value).splitlines()]
    assert sorted(places) == [
        "launch.ranks", "plan",
        "profiles.a.launch.ranks", "profiles.a.plan", "profiles.a.plan.flush",
    ]  # fmt: skip


@pytest.mark.parametrize("form", ["toml", "yaml"])
def test_depth_is_an_error(form):
    deep = "[" * 5000
    with pytest.raises(fx.PlanError):
        parse(f"x = {deep}" if form == "toml" else deep, form)


@pytest.mark.parametrize("name", ["a.toml", "a.ini", "."])
def test_a_file_that_cannot_be_read_is_an_error(name, tmp_path):
    with pytest.raises(fx.PlanError, match=r"launch file|name that ends in"):
        read_launch_file(tmp_path / name)


def test_a_file_that_is_no_text_is_an_error(tmp_path):
    (tmp_path / "a.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(fx.PlanError, match="utf-8"):
        read_launch_file(tmp_path / "a.toml")


def test_each_layer_wins_over_those_below(good):
    env = {"FXTRAIN_LAUNCH__RANKS": "3", "FXTRAIN_PLAN__SEED": "1", "FXTRAIN_PLAN__EVEN": "drop"}
    settings = resolve(env=env, flags=from_flags(["plan.seed=2"]))
    assert settings.launch.ranks == 3
    assert settings.plan == fx.Plan(
        strategy=fx.DDP(bucket_mib=50.0), precision="bf16", accumulate=4, seed=2, even="drop",
        data=fx.Data(source="dispatch"),
    )  # fmt: skip
    origins = {one.path: one.origin for one in settings.every()}
    assert origins["launch.ranks"] == "environment FXTRAIN_LAUNCH__RANKS"
    assert origins["plan.seed"] == "flag"
    assert origins["plan.even"] == "environment FXTRAIN_PLAN__EVEN"
    assert origins["plan.accumulate"] == "file fxtrain.toml, profile big"
    assert origins["plan.precision.compute"] == "file fxtrain.toml"
    assert origins["plan.strategy.bucket_mib"] == "file fxtrain.toml"
    assert origins["plan.strategy.static_graph"] == "default"
    assert origins["launch.restarts"] == "default"


@pytest.mark.parametrize(
    ("profile", "env", "ranks"),
    [("", {}, 8), ("small", {}, 2), ("", {"FXTRAIN_PROFILE": "small"}, 2),
     ("big", {"FXTRAIN_PROFILE": "small"}, 8)],
)  # fmt: skip
def test_the_profile_that_counts(good, profile, env, ranks):
    assert resolve(profile=profile, env=env).launch.ranks == ranks


def test_a_profile_that_is_not_there_is_told_with_the_closest(good):
    with pytest.raises(fx.PlanError, match=r"'smal' \(did you mean 'small'\?\): .* has big, small"):
        resolve(profile="smal")


def test_nothing_at_all_is_the_defaults(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    settings = resolve()
    assert (settings.file, settings.plan) == ("", fx.Plan())
    assert {one.origin for one in settings.every()} == {"default"}


def test_a_wrong_value_is_told_with_its_origin(good):
    with pytest.raises(fx.PlanError) as told:
        resolve(env={"FXTRAIN_PLAN__EVEN": "dorp"}, flags=from_flags(["launch.ranks=two"]))
    first, second = told.value.message.splitlines()
    assert first.startswith("launch.ranks: found 'two'") and first.endswith(" (flag)")
    assert second.startswith("plan.even: found 'dorp'")
    assert second.endswith("(environment FXTRAIN_PLAN__EVEN)")


@pytest.mark.parametrize("word", ["ranks=2", "launch.ranks", "launch..x=1", "data.x=1", "="])
def test_a_flag_that_sets_nothing_is_an_error(word):
    with pytest.raises(fx.PlanError, match="write a value as"):
        from_flags([word])


def test_which_file_counts(tmp_path):
    own = tmp_path / "fxtrain" / "launch.toml"
    env = {"XDG_CONFIG_HOME": str(tmp_path)}
    here = tmp_path / "here"
    here.mkdir()
    assert find_file(env, folder=here) == ""
    own.parent.mkdir()
    own.touch()
    assert find_file(env, folder=here) == str(own)
    assert find_file({"HOME": "/nowhere"}, folder=here) == ""
    (here / "fxtrain.yaml").touch()
    assert find_file(env, folder=here) == str(here / "fxtrain.yaml")
    assert find_file({**env, "FXTRAIN_CONFIG": "x.toml"}, folder=here) == "x.toml"


def test_every_field_is_explained_and_offered():
    text = render(LaunchFile(), "toml")
    assert "Micro-batches per optimizer update." in text
    assert all(f"# {field.name}" in text for field in attrs.fields(fx.Plan) if field.name != "x")
    assert parse(text, "toml") == LaunchFile()


def test_the_template_has_every_field_with_its_default():
    unset = {"target", "args", "module"}  # given on the command line
    for name, cls in (("launch", LaunchSpec), ("plan", fx.Plan)):
        lines = render(LaunchFile(), "toml").partition(f"[{name}]\n")[2].split("\n\n")[0]
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
    text = render(LaunchFile(), "toml").replace("# accumulate = 1", "accumulate = 3")
    assert parse(text, "toml").plan == {"accumulate": 3}


def test_what_suits_a_machine():
    assert suggested(Machine()).launch == {"ranks": 1}
    assert detect_machine({"PATH": "", "TPU_NAME": "pod"}).tpu == "pod"
    assert not detect_machine({"PATH": ""}).slurm


def test_default_writes_a_file_that_is_in_order(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["config", "default"]) == Exit.WELL
    assert main(["config", "check"]) == Exit.WELL
    assert "fxtrain.toml is valid" in capsys.readouterr().out
    before = (tmp_path / "fxtrain.toml").read_text()
    assert main(["config", "default"]) == Exit.WRONG
    assert "already exists" in capsys.readouterr().err
    assert (tmp_path / "fxtrain.toml").read_text() == before
    assert main(["config", "default", "--force", "sub/run.yaml"]) == Exit.WELL
    assert read_launch_file("sub/run.yaml").launch == {"ranks": detect_machine().count or 1}


def test_check_tells_mistakes_by_its_exit_code(good, capsys):
    good.write_text("[launch]\nrank = 2\n")
    assert main(["config", "check", "--json"]) == Exit.FOUND
    told = json.loads(capsys.readouterr().out)
    assert told["file"] == "fxtrain.toml"
    assert "did you mean 'ranks'?" in told["problems"][0] and len(told["problems"]) == 1
    assert main(["config", "check"]) == Exit.FOUND
    assert main(["config", "check", "nowhere.toml"]) == Exit.WRONG
    assert "Traceback" not in capsys.readouterr().err


def test_show_gives_every_value_an_origin(good, capsys):
    assert main(["config", "show", "--json", "--profile", "small", "--set", "plan.seed=5"]) == 0
    told = json.loads(capsys.readouterr().out)
    values = {row["path"]: (row["value"], row["origin"]) for row in told["values"]}
    assert told["profile"] == "small"
    assert values["plan.seed"] == (5, "flag")
    assert values["plan.strategy.kind"] == ("single", "file fxtrain.toml, profile small")
    assert main(["config", "show", "--said"]) == 0
    shown = capsys.readouterr().out
    assert "plan.accumulate" in shown and "plan.seed" not in shown
    assert "\x1b" not in shown  # no colour outside a terminal


def test_the_streams_of_ranks_are_explained():
    before = render(LaunchFile(), "toml").partition("show_ranks")[0].splitlines()
    assert "# Ranks of each node whose output is shown here; all by default." in before[-2]


@pytest.mark.parametrize("form", ["toml", "yaml", "json"])
def test_update_keeps_values_and_offers_new_fields(form, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / f"fxtrain.{form}"
    file = parse(GOOD, "toml")
    head = "" if form == "json" else "# Of our cluster.\n"
    path.write_text(head + render(file, form, brief=True))
    assert main(["config", "update", path.name]) == Exit.WELL
    text = path.read_text()
    assert read_launch_file(path) == file
    assert text.startswith(head) and ("show_ranks" in text) == (form == "toml")
    assert main(["config", "update", path.name]) == Exit.WELL
    assert path.read_text() == text
    assert f"Updated {path.name}" in capsys.readouterr().out


def test_update_keeps_a_null_of_a_profile(tmp_path):
    path = tmp_path / "a.yaml"
    path.write_text("plan: {clip_norm: 1.0}\nprofiles: {free: {plan: {clip_norm: null}}}\n")
    assert main(["config", "update", str(path)]) == Exit.WELL
    assert read_launch_file(path).section("free").plan == {"clip_norm": None}


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
