"""What devices and their links can do: a table of published figures, and files of measured ones."""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import attrs

from fxtrain._record import above, at_least, closest, record, shown
from fxtrain.errors import PlanError
from fxtrain.state.files import read_record

_positive = above(0)


def _are_rates(_: Any, field: Any, value: Mapping[str, Any]) -> None:
    known = all(type(rate) in (int, float) and 0 < rate < 1e30 for rate in value.values())
    if not known or (not value and field.default is attrs.NOTHING):
        raise ValueError("choose FLOP/s above 0 by dtype, such as {'bf16': 312e12}.")


def _are_shares(_: Any, __: Any, value: Mapping[str, Any]) -> None:
    if not all(type(share) in (int, float) and 0 < share < 1e6 for share in value.values()):
        raise ValueError("choose shares above 0 by kind, such as {'all_gather': 0.8}.")


def _table(choose: str, check: Any, **default: Any) -> Any:
    return attrs.field(validator=check, hash=False, metadata={"choose": choose}, **default)


@record
class Device:
    """A device, and the links from it to others, for estimates of the time of a step.

    Attributes:
        name: Of the device.
        source: Where its figures are from.
        type: gpu: launches and links work beside the device; cpu: the cores that compute also
            launch operators and serve links.
        memory: Bytes.
        flops: Peak FLOP/s by dtype: fp32, tf32, bf16, fp16, fp8. Another dtype takes the lowest.
        efficiency: Share of the peak that large matrix products reach.
        attention_flops: FLOP/s that fused attention reaches, by dtype. Where it is empty, those of
            matrix products.
        convolution_flops: FLOP/s that convolutions reach, likewise.
        memory_bandwidth: Bytes per second that operators read and write.
        launch_s: Seconds to launch an operator.
        hook_s: Seconds of the host for each collective that Python starts within a pass: those of
            FSDP, of tensor parallelism, of pipelines; not those of DDP.
        link_bandwidth: Bytes per second that a device sends to another one of its node.
        link_latency_s: Seconds until the first byte arrives.
        node_bandwidth: Bytes per second that a device sends to another node.
        node_latency_s: Seconds until the first byte arrives there.
        bandwidth_efficiency: Share of these bandwidths that is reached.
        collective_efficiency: Share of that of an all-reduce that another collective reaches, by
            kind, such as all_gather. A kind that is missing reaches as much.
        host_bandwidth: Bytes per second between the device and host memory.
        overlap: Share of the time of operators during which links can work as well.
        ranks_per_node: Devices of a node.

    Example:
        >>> import attrs, fxtrain as fx
        >>> device = fx.state.read_device("H100")
        >>> device.flops["bf16"], attrs.evolve(device, memory=96_000_000_000).memory
        (989400000000000.0, 96000000000)
    """

    name: str
    source: str = ""
    type: Literal["gpu", "cpu"] = "gpu"
    memory: int = attrs.field(validator=at_least(1))
    flops: Mapping[str, float] = _table("a table of FLOP/s by dtype", _are_rates)
    efficiency: float = attrs.field(default=1.0, validator=_positive)
    attention_flops: Mapping[str, float] = _table(
        "a table of FLOP/s by dtype", _are_rates, factory=dict
    )
    convolution_flops: Mapping[str, float] = _table(
        "a table of FLOP/s by dtype", _are_rates, factory=dict
    )
    memory_bandwidth: float = attrs.field(validator=above(0))
    launch_s: float = attrs.field(validator=at_least(0))
    hook_s: float = attrs.field(default=0.0, validator=at_least(0))
    link_bandwidth: float = attrs.field(validator=above(0))
    link_latency_s: float = attrs.field(validator=at_least(0))
    node_bandwidth: float = attrs.field(validator=above(0))
    node_latency_s: float = attrs.field(validator=at_least(0))
    bandwidth_efficiency: float = attrs.field(default=1.0, validator=_positive)
    collective_efficiency: Mapping[str, float] = _table(
        "a table of shares by kind", _are_shares, factory=dict
    )
    host_bandwidth: float = attrs.field(default=25e9, validator=above(0))
    overlap: float = attrs.field(default=1.0, validator=at_least(0, 1))
    ranks_per_node: int = attrs.field(default=8, validator=at_least(1))


def _published(
    name: str,
    source: str,
    gb: int,
    memory_tb: float,
    rates: tuple[float | None, ...],
    attention: float = 0.35,
    **figures: float,
) -> Device:
    """A device of the table; `rates` are TFLOP/s of dense products, in the order of `_DTYPES`.

    Fields that no vendor publishes are assumptions. Source of the efficiency of attention:
    FlashAttention-2 reaches 35 % of the peak of an H100 (arXiv:2407.08608) and 50 to 73 % of that
    of an A100 (arXiv:2307.08691).
    """
    figures = {"node_bandwidth": 50e9, "host_bandwidth": 50e9, "efficiency": 0.7, **figures}
    assumed = "Efficiencies, latencies and the time of a launch are assumptions of fxtrain."
    peaks = zip(_DTYPES, rates, strict=True)
    flops = {dtype: rate * 1e12 for dtype, rate in peaks if rate is not None}
    return Device(
        name=name,
        source=f"{source}. {assumed}",
        memory=gb * 10**9,
        flops=flops,
        attention_flops={dtype: attention * rate for dtype, rate in flops.items()},
        convolution_flops={dtype: 0.5 * rate for dtype, rate in flops.items()},
        memory_bandwidth=memory_tb * 1e12,
        launch_s=5e-6,
        hook_s=1e-4,
        link_latency_s=2e-6,
        node_latency_s=5e-6,
        bandwidth_efficiency=0.8,
        **figures,  # pyright: ignore[reportArgumentType]
    )


_DTYPES = ("fp32", "tf32", "bf16", "fp16", "fp8")
_PCIE_4 = {"link_bandwidth": 32e9, "node_bandwidth": 25e9, "host_bandwidth": 25e9}
_ASSUMED_200 = "200 Gb/s per GPU between nodes is an assumption"
_TABLE = (
    _published(
        "A100",
        "NVIDIA A100 Tensor Core GPU data sheet (80GB SXM: dense rates, NVLink 600 GB/s in both "
        "directions); NVIDIA DGX A100 data sheet (200 Gb/s per GPU between nodes)",
        80, 2.039, (19.5, 156, 312, 312, None), link_bandwidth=300e9, node_bandwidth=25e9,
        host_bandwidth=25e9, efficiency=0.8, attention=0.6,
    ),
    _published(
        "H100",
        "NVIDIA H100 Tensor Core GPU data sheet (SXM: dense rates, half of those with sparsity; "
        "NVLink 900 GB/s in both directions); NVIDIA DGX H100 data sheet (400 Gb/s per GPU)",
        80, 3.35, (66.9, 494.7, 989.4, 989.4, 1978.9), link_bandwidth=450e9,
    ),
    _published(
        "H100 PCIe",
        "NVIDIA H100 Tensor Core GPU architecture whitepaper (PCIe: dense rates; PCIe 5.0 x16, "
        f"128 GB/s in both directions, without a bridge); {_ASSUMED_200}",
        80, 2.0, (51.2, 378, 756, 756, 1513), link_bandwidth=64e9, node_bandwidth=25e9,
    ),
    _published(
        "H200",
        "NVIDIA H200 Tensor Core GPU data sheet (SXM: dense rates; NVLink 900 GB/s in both "
        "directions); NVIDIA DGX H200 data sheet (400 Gb/s per GPU)",
        141, 4.8, (66.9, 494.7, 989.4, 989.4, 1978.9), link_bandwidth=450e9,
    ),
    _published(
        "B200",
        "NVIDIA DGX B200 and HGX B200 data sheets, an eighth of a system (dense rates; "
        "NVLink 1.8 TB/s in both directions; 400 Gb/s per GPU)",
        180, 8.0, (75, 1100, 2250, 2250, 4500), link_bandwidth=900e9,
    ),
    _published(
        "MI300X",
        "AMD Instinct MI300X data sheet (dense rates; seven Infinity Fabric links of 128 GB/s in "
        "both directions); 400 Gb/s per GPU between nodes is an assumption",
        192, 5.3, (163.4, 653.7, 1307.4, 1307.4, 2614.9), link_bandwidth=448e9, efficiency=0.5,
    ),
    _published(
        "L40S",
        "NVIDIA L40S data sheet (dense rates; PCIe 4.0 x16, 64 GB/s in both directions); "
        f"{_ASSUMED_200}",
        48, 0.864, (91.6, 183, 362, 362, 733), **_PCIE_4,
    ),
    _published(
        "A10",
        f"NVIDIA A10 data sheet (dense rates; PCIe 4.0 x16, 64 GB/s in both directions); "
        f"{_ASSUMED_200}",
        24, 0.6, (31.2, 62.5, 125, 125, None), **_PCIE_4,
    ),
    _published(
        "L4",
        "NVIDIA Ada GPU architecture whitepaper and L4 data sheet (dense rates; PCIe 4.0 x16, "
        f"64 GB/s in both directions); {_ASSUMED_200}",
        24, 0.3, (30.3, 60, 121, 121, 242.5), **_PCIE_4,
    ),
    _published(
        "T4",
        f"NVIDIA T4 data sheet (PCIe 3.0 x16, 32 GB/s in both directions); {_ASSUMED_200}",
        16, 0.32, (8.1, None, None, 65, None),
        link_bandwidth=16e9, node_bandwidth=16e9, host_bandwidth=12e9,
    ),
    _published(
        "RTX 4090",
        "NVIDIA Ada GPU architecture whitepaper (dense rates with fp32 accumulation; PCIe 4.0 x16, "
        "64 GB/s in both directions, no peer access); 100 Gb/s between nodes is an assumption",
        24, 1.008, (82.6, 82.6, 165.2, 165.2, 330.3),
        link_bandwidth=16e9, node_bandwidth=12.5e9, host_bandwidth=25e9,
    ),
)  # fmt: skip
DEVICES: Mapping[str, Device] = MappingProxyType({device.name: device for device in _TABLE})


def read_device(device: str | Path | Device) -> Device:
    """A device by its name in the table of published ones, or from a file.

    Args:
        device: A name such as "H100", in any case; the path of a .toml, .json or .yaml file, as
            `fxtrain env --measure` writes it; or a record, which is returned.

    Raises:
        PlanError: no device has that name, or the file is none.

    Example:
        >>> import fxtrain as fx
        >>> fx.state.read_device("a100").name
        'A100'
        >>> fx.state.read_device("A11")
        Traceback (most recent call last):
        fxtrain.errors.PlanError: 'A11' is no known device; known are A100, H100, ...
    """
    if isinstance(device, Device):
        return device
    names = {name.lower().replace(" ", ""): name for name in DEVICES}
    plain = str(device).lower().replace(" ", "")
    if plain in names:
        return DEVICES[names[plain]]
    if Path(str(device)).suffix:
        return read_record(device, Device)
    raise PlanError(
        f"{shown(str(device))} is no known device; known are {', '.join(DEVICES)}. Use one of "
        f"these, or a file that `fxtrain env --measure device.toml` wrote on such a machine."
        f"{closest(str(device).upper(), DEVICES)}"
    )
