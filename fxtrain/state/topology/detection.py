"""The rank of a process, as a launcher describes it."""

import attrs


@attrs.frozen(kw_only=True)
class Topology:
    """The rank of this process, and the address to which ranks connect, by a launcher.

    Attributes:
        rank: Number of this rank, from 0.
        world_size: Number of ranks.
        local_rank: Number of this rank on its node.
        local_world_size: Ranks on this node.
        node_rank: Number of this node.
        num_nodes: Number of nodes.
        launcher: torchrun, slurm, openmpi, mpich, pjrt, plain or none.
        main_address: Host name or address of the node of rank 0.
        main_port: TCP port there; 0 at one rank.
        store_is_served: Whether the launcher already serves the store at that port, so that
            rank 0 connects to it like the others.
        attempt: Number of the restart under an elastic launcher; each uses separate keys.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    node_rank: int = 0
    num_nodes: int = 1
    launcher: str = "none"
    main_address: str = "127.0.0.1"
    main_port: int = 0
    store_is_served: bool = False
    attempt: int = 0
