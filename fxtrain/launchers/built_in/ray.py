"""Ray: one native launcher on each node of the run."""

import json

import attrs

from fxtrain.launchers.launcher import PER_NODE, Launcher
from fxtrain.launchers.machine import Machine
from fxtrain.launchers.spec import Invocation, LaunchSpec, flag_words, launch_record, number_from

_FILE = "fxtrain-launch/ray.json"


@launch_record
class RayOptions:
    """What a run requests from Ray.

    Attributes:
        job_server: Address of the cluster's job server, such as http://head:8265, to submit the
            current folder to; by default the run starts from here.
        address: Address of the cluster for a run that starts from here: "auto" for the one on
            this machine; by default a new cluster.
        cpus_per_rank: CPUs to reserve for each rank.
        gpus_per_rank: GPUs to reserve for each rank.
        wait: Show the output of a submitted job until it ends.
    """

    job_server: str = ""
    address: str = ""
    cpus_per_rank: int = attrs.field(default=1, validator=number_from(1))
    gpus_per_rank: int = attrs.field(default=0, validator=number_from(0))
    wait: bool = True


def ray(spec: LaunchSpec, machine: Machine) -> Invocation:
    """A program that places the nodes, from here or as a job of a cluster.

    Its settings are in a file, since Ray passes the arguments of a job through a shell.
    """
    options = spec.options
    each = attrs.evolve(spec, launcher="native", options=None)
    settings = {
        "nodes": spec.nodes,
        "cpus": options.cpus_per_rank * spec.ranks,
        "gpus": options.gpus_per_rank * spec.ranks,
        "main_port": spec.main_port,
        "address": options.address,
        "words": flag_words(each),
    }
    if options.job_server:
        settings["address"] = "auto"
        submit = ("ray", "job", "submit", f"--address={options.job_server}", "--working-dir=.")
        before = (*submit, *(() if options.wait else ("--no-wait",)), "--", "python")
    else:
        before = (machine.python,)
    return Invocation(
        argv=(*before, "-m", "fxtrain.launchers.built_in.ray_driver", _FILE),
        files={_FILE: json.dumps(settings, indent=2) + "\n"},
    )


RAY = Launcher(
    name="ray",
    help="the nodes of a Ray cluster",
    invocation=ray,
    options=RayOptions,
    uses=[*PER_NODE, "main_port"],
)
