"""What version 3 of SageMaker's SDK is called with, and version 2."""

import importlib.machinery
import runpy
import sys
import types

import attrs
import pytest

from fxtrain.launchers import prepare
from tests._errors import raises_code
from tests.launchers._specs import HERE, SAGEMAKER, spec_of

# What sagemaker 3.27.0 takes, by class or function: fields of its models, and parameters. Without a
# connection, it has made the objects of a job of arguments as in these tests.
TAKES = {
    "SourceCode": ("args command entry_script ignore_patterns requirements source_dir"),
    "Compute": (
        "enable_managed_spot_training instance_count instance_groups "
        "instance_placement_config instance_preferences instance_type "
        "keep_alive_period_in_seconds selected_instance_count selected_instance_type "
        "training_plan_arn volume_kms_key_id volume_size_in_gb"
    ),
    "InputData": ("channel_name content_type data_source"),
    "StoppingCondition": (
        "max_pending_time_in_seconds max_runtime_in_seconds max_wait_time_in_seconds"
    ),
    "OutputDataConfig": ("compression_type kms_key_id s3_output_path"),
    "CheckpointConfig": ("local_path s3_uri"),
    "RetryStrategy": ("maximum_retry_attempts"),
    "Torchrun": ("process_count_per_node smp"),
    "ModelTrainer": (
        "algorithm_name base_job_name checkpoint_config compute config_mgr distributed "
        "environment hyperparameters input_data_config input_s3_key_prefix "
        "local_container_root model_package_config networking output_data_config role "
        "sagemaker_session source_code stopping_condition tags training_image "
        "training_image_config training_input_mode training_mode"
    ),
    "train": ("dry_run input_data_config logs wait"),
    "retrieve": (
        "accelerator_type base_framework_version config_name container_version "
        "distribution framework hub_arn image_scope inference_tool instance_type "
        "model_id model_type model_version py_version region sagemaker_session "
        "sdk_version serverless_inference_config tolerate_deprecated_model "
        "tolerate_vulnerable_model training_compiler_config version"
    ),
}
BY_NAME = attrs.evolve(
    SAGEMAKER, framework_version="", py_version="", image_uri="i", checkpoints="s3://b/c",
    output_path="s3://b/o", base_job_name="job",
)  # fmt: skip


class _Recorded:
    """Makes modules that note how they are called, and refuse what the real ones do not take."""

    def __init__(self):
        self.calls = []

    def callable(self, name, returns=None):
        def call(**arguments):
            unknown = arguments.keys() - set(TAKES[name].split())
            assert not unknown, f"{name} does not take {unknown}"
            self.calls.append((name, arguments))
            return (name, arguments) if returns is None else returns

        return call


@pytest.fixture
def recorded(monkeypatch):
    """Version 3, as far as it is used."""
    found = _Recorded()
    trainer = types.SimpleNamespace(train=found.callable("train", "started"))
    trainer.with_retry_strategy = lambda strategy: (
        found.calls.append(("retry", strategy)) or trainer
    )
    session = types.SimpleNamespace(boto_region_name="us-east-1")
    names = "SourceCode Compute InputData StoppingCondition OutputDataConfig CheckpointConfig"
    modules = {
        "sagemaker": {},
        "sagemaker.train": {
            "ModelTrainer": found.callable("ModelTrainer", trainer),
            "configs": types.SimpleNamespace(
                **{name: found.callable(name) for name in (*names.split(), "RetryStrategy")}
            ),
        },
        "sagemaker.train.distributed": {"Torchrun": found.callable("Torchrun")},
        "sagemaker.core": {
            "image_uris": types.SimpleNamespace(retrieve=found.callable("retrieve", "an image"))
        },
        "sagemaker.core.helper.session_helper": {"Session": lambda: session},
    }
    for name, values in modules.items():
        module = types.ModuleType(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None)
        vars(module).update(values)
        monkeypatch.setitem(sys.modules, name, module)
    return found


def _submit(tmp_path, **fields):
    (text,) = prepare(spec_of("sagemaker", **fields), HERE).files.values()
    file = tmp_path / "job.py"
    file.write_text(text)
    runpy.run_path(str(file))


def test_a_job_is_a_trainer(recorded, tmp_path):
    _submit(
        tmp_path, nodes=2, ranks=8, restarts=3, args=["--lr", "0.1"], env=["A=1"], options=BY_NAME,
    )  # fmt: skip
    calls = dict(recorded.calls)
    trainer = calls["ModelTrainer"]
    assert trainer["source_code"] == ("SourceCode", {"source_dir": ".", "entry_script": "train.py"})
    machine = {"instance_type": "ml.p4d.24xlarge", "instance_count": 2}
    assert calls["Compute"] == {**machine, "enable_managed_spot_training": True}
    assert trainer["distributed"] == ("Torchrun", {"process_count_per_node": 8})
    assert calls["StoppingCondition"] == {
        "max_runtime_in_seconds": 60,
        "max_wait_time_in_seconds": 60,
    }
    assert trainer["checkpoint_config"] == ("CheckpointConfig", {"s3_uri": "s3://b/c"})
    assert trainer["output_data_config"] == ("OutputDataConfig", {"s3_output_path": "s3://b/o"})
    assert trainer["hyperparameters"] == {"lr": "0.1"} and trainer["environment"] == {"A": "1"}
    assert trainer["training_image"] == "i" and trainer["role"] == "me"
    assert trainer["training_mode"] == "SAGEMAKER_TRAINING_JOB"
    assert calls["retry"] == ("RetryStrategy", {"maximum_retry_attempts": 3})
    channel = ("InputData", {"channel_name": "train", "data_source": "s3://b/d"})
    assert recorded.calls[-1] == ("train", {"input_data_config": [channel], "wait": False})


def test_the_image_of_a_version_is_found(recorded, tmp_path):
    _submit(tmp_path, options=SAGEMAKER)
    calls = dict(recorded.calls)
    assert calls["ModelTrainer"]["training_image"] == "an image"
    assert calls["retrieve"] == {
        "region": "us-east-1",
        "framework": "pytorch",
        "version": "2.5",
        "py_version": "py311",
        "instance_type": "ml.p4d.24xlarge",
        "image_scope": "training",
    }
    assert calls["Torchrun"] == {} and "retry" not in calls  # a rank for each accelerator


@pytest.mark.parametrize(
    ("machine", "local"), [("ml.p4d.24xlarge", "local_gpu"), ("ml.m5", "local")]
)
def test_a_container_on_this_machine(recorded, tmp_path, machine, local):
    options = attrs.evolve(BY_NAME, local=True, instance_type=machine)
    _submit(tmp_path, options=options)
    calls = dict(recorded.calls)
    assert calls["ModelTrainer"]["training_mode"] == "LOCAL_CONTAINER"
    assert calls["Compute"]["instance_type"] == local


@pytest.fixture
def recorded_2(monkeypatch):
    """Version 2, as far as it is used."""
    calls = []
    estimator = types.SimpleNamespace(fit=lambda **given: calls.append(given))
    package, pytorch = types.ModuleType("sagemaker"), types.ModuleType("sagemaker.pytorch")
    package.__path__ = []
    package.__spec__ = importlib.machinery.ModuleSpec("sagemaker", None)
    pytorch.PyTorch = lambda **given: calls.append(given) or estimator
    monkeypatch.setitem(sys.modules, "sagemaker", package)
    monkeypatch.setitem(sys.modules, "sagemaker.pytorch", pytorch)
    return calls


def test_version_2_gets_an_estimator(recorded_2, tmp_path):
    args = ["--lr", "0.1", "--name=a b"]
    _submit(tmp_path, nodes=2, args=args, env=["A=1"], options=SAGEMAKER)
    arguments = {
        "entry_point": "train.py",
        "source_dir": ".",
        "role": "me",
        "instance_type": "ml.p4d.24xlarge",
        "instance_count": 2,
        "framework_version": "2.5",
        "py_version": "py311",
        "max_run": 60,
        "max_wait": 60,
        "use_spot_instances": True,
        "distribution": {"torch_distributed": {"enabled": True}},
        "hyperparameters": {"lr": "0.1", "name": "a b"},
        "environment": {"A": "1"},
    }
    assert recorded_2 == [arguments, {"inputs": {"train": "s3://b/d"}, "wait": False}]


def test_a_job_waits_for_spot_instances(recorded, tmp_path):
    options = attrs.evolve(SAGEMAKER, max_wait_s=90)
    _submit(tmp_path, options=options)
    waits = {"max_runtime_in_seconds": 60, "max_wait_time_in_seconds": 90}
    assert dict(recorded.calls)["StoppingCondition"] == waits
    for change in ({"spot": False}, {"max_wait_s": 30}):
        with raises_code("FX700", "max_wait_s=", "max_run_s=60"):
            prepare(spec_of("sagemaker", options=attrs.evolve(options, **change)), HERE)


def test_settings_of_version_2(recorded_2, tmp_path):
    _submit(tmp_path, restarts=2, options=attrs.evolve(BY_NAME, local=True))
    arguments = recorded_2[0]
    assert arguments["max_retry_attempts"] == 2 and arguments["checkpoint_s3_uri"] == "s3://b/c"
    assert arguments["instance_type"] == "local_gpu" and arguments["image_uri"] == "i"
    with pytest.raises(SystemExit, match="one rank per accelerator"):
        _submit(tmp_path, ranks=8, options=BY_NAME)


def test_version_2_knows_these_arguments(recorded_2, tmp_path):
    _submit(tmp_path, restarts=2, options=attrs.evolve(BY_NAME, framework_version="2.5"))
    used = set(recorded_2[0])
    sys.modules.pop("sagemaker"), sys.modules.pop("sagemaker.pytorch")
    estimator = pytest.importorskip("sagemaker.estimator", reason="sagemaker is not installed")
    kinds = (estimator.Framework, estimator.EstimatorBase)
    known = {name for kind in kinds for name in kind.__init__.__code__.co_varnames}
    own = {"framework_version", "py_version", "distribution"}  # of sagemaker.pytorch.PyTorch
    assert used - own <= known
