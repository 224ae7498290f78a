"""The program that requests nodes from Ray and runs a native launcher on each of them.

`python -m fxtrain.launchers.built_in.ray_driver FILE`, with the file that
`fxtrain launch --launcher ray` has written.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from fxtrain._addresses import free_port
from fxtrain._optional import optional
from fxtrain.launchers.child import end_with_parent


def main() -> int:
    """Run the launch in the file; the exit code of the first node that failed, or 0."""
    settings = json.loads(Path(sys.argv[1]).read_text())
    ray = optional("ray", extra="ray", needed_by="fxtrain launch --launcher ray")
    if settings["address"]:
        ray.init(address=settings["address"])
    else:
        ray.init(include_dashboard=False)
    try:
        return _run(ray, settings)
    finally:
        ray.shutdown()


def node_words(settings: dict[str, Any], node: int, address: str, port: int) -> list[str]:
    """The arguments of `fxtrain launch` on one node."""
    words: list[str] = list(settings["words"])
    if settings["nodes"] == 1:
        return words
    place = [f"--node-rank={node}", f"--main-address={address}", f"--main-port={port}"]
    # After those of the spec, since the last of two counts.
    split = words.index("--")
    return [*words[:split], *place, *words[split:]]


def _run(ray: Any, settings: dict[str, Any]) -> int:
    """Place the nodes, start their launchers, and wait until all have finished or one failed."""
    nodes = settings["nodes"]
    share = {"CPU": settings["cpus"], **({"GPU": settings["gpus"]} if settings["gpus"] else {})}
    spread = "STRICT_SPREAD" if nodes > 1 else "STRICT_PACK"
    group = ray.util.placement_group([share] * nodes, strategy=spread)
    ray.get(group.ready())
    actors = [
        ray.remote(_Node).options(
            num_cpus=settings["cpus"],
            num_gpus=settings["gpus"],
            scheduling_strategy=ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
                placement_group=group, placement_group_bundle_index=node
            ),
        ).remote()
        for node in range(nodes)
    ]  # fmt: skip
    address, port = ray.get(actors[0].place.remote(settings["main_port"]))
    running = [
        actor.run.remote(node_words(settings, node, address, port))
        for node, actor in enumerate(actors)
    ]
    while running:
        done, running = ray.wait(running, num_returns=1)
        if code := ray.get(done[0]):
            return int(code)
    return 0


class _Node:
    """One machine of the run, as a Ray actor."""

    def place(self, port: int) -> tuple[str, int]:
        """The address by which other nodes reach this one."""
        ray = optional("ray", extra="ray", needed_by="fxtrain launch --launcher ray")
        return str(ray.util.get_node_ip_address()), port or free_port()

    def run(self, words: list[str]) -> int:
        """Run the native launcher to its end."""
        command = [sys.executable, "-m", "fxtrain", "launch", *words]
        # Ray ends this process without notice when another node has failed.
        return subprocess.run(command, check=False, preexec_fn=end_with_parent).returncode


if __name__ == "__main__":
    sys.exit(main())
