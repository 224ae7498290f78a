"""What is handed to Kubernetes."""

import json

from fxtrain.launchers import KubernetesOptions, prepare
from tests.launchers._specs import HERE, spec_of


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
