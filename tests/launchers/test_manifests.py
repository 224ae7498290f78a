"""What is handed to Kubernetes and SageMaker."""

import json

import pytest

from fxtrain.launchers import KubernetesOptions, prepare
from tests.launchers._specs import HERE, SAGEMAKER, spec_of


def _manifest(**fields):
    options = KubernetesOptions(
        image="me/train:1", gpus=8, memory="64Gi", shared_memory="8Gi", claims=["data:/data"],
        node_selector=["pool=a"], folder="/app", namespace="ml", **fields,
    )  # fmt: skip
    spec = spec_of(
        "kubernetes", ranks=8, nodes=3, args=["$(HOME)"], env=["A=$(B)"], restarts=2,
        options=options,
    )  # fmt: skip
    (text,) = prepare(spec, HERE).files.values()
    return json.loads(text)


def _check_pod(pod, place):
    (container,) = pod["containers"]
    assert container["command"] == ["python", "-m", "fxtrain.cli", "launch"]
    words = [*place, "--ranks=8", "--nodes=3", "--", "train.py", "$$(HOME)"]
    assert container["args"] == words
    assert container["env"] == [{"name": "A", "value": "$$(B)"}]
    assert container["resources"]["limits"] == {"memory": "64Gi", "nvidia.com/gpu": "8"}
    assert {mount["mountPath"] for mount in container["volumeMounts"]} == {"/data", "/dev/shm"}
    assert pod["restartPolicy"] == "Never"
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


def test_pytorch_job():
    found = _manifest(manifest="pytorchjob")
    assert (found["apiVersion"], found["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    assert found["spec"]["runPolicy"]["backoffLimit"] == 2
    replicas = found["spec"]["pytorchReplicaSpecs"]
    assert {name: one["replicas"] for name, one in replicas.items()} == {"Master": 1, "Worker": 2}
    place = ["--node-rank=$(RANK)", "--main-address=$(MASTER_ADDR)", "--main-port=$(MASTER_PORT)"]
    for one in replicas.values():
        (container,) = one["template"]["spec"]["containers"]
        assert container["name"] == "pytorch"
        _check_pod(one["template"]["spec"], place)


def test_sagemaker_estimator():
    args = ["--lr", "0.1", "--name=a b"]
    spec = spec_of("sagemaker", nodes=2, args=args, env=["A=1"], options=SAGEMAKER)
    (text,) = prepare(spec, HERE).files.values()
    job = json.loads(text)
    del job["trainer"]  # tests/launchers/test_sagemaker.py
    assert job == {
        "estimator": {
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
        },
        "ranks": 1,
        "inputs": {"train": "s3://b/d"},
        "wait": False,
    }


def test_sagemaker_knows_these_arguments():
    estimator = pytest.importorskip("sagemaker.estimator", reason="sagemaker is not installed")
    kinds = (estimator.Framework, estimator.EstimatorBase)
    known = {name for kind in kinds for name in kind.__init__.__code__.co_varnames}
    own = {"framework_version", "py_version", "distribution"}  # of sagemaker.pytorch.PyTorch
    (text,) = prepare(spec_of("sagemaker", options=SAGEMAKER), HERE).files.values()
    assert set(json.loads(text)["estimator"]) - own <= known
