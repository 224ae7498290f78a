"""What makes a CPU compute faster: bf16, channels-last, inductor with prepacked weights.

python -m benchmarks.cpu

Inference of a convolutional network and of a transformer encoder, under plans of fxtrain. All
variants take turns, on the threads that torch chooses. Compiling needs a C++ compiler, and takes
most of the time: about half a minute per compiled plan.
"""

import torch
from torch import nn

import fxtrain as fx
from benchmarks._common import for_seconds, show, tell

SECONDS = 15  # for each network, after compiling
CALLS = 3  # in one turn
_PREPACKED = fx.Compile(prepack=True)
PLANS = {
    "fp32": fx.Plan(),
    "bf16": fx.Plan(precision="bf16"),
    "fp32, compiled": fx.Plan(compile=True),
    "fp32, compiled, prepacked": fx.Plan(compile=_PREPACKED),
    "bf16, compiled, prepacked": fx.Plan(precision="bf16", compile=_PREPACKED),
}
LAST = ", channels-last"


def _convolutions():
    layers = []
    for width, before in ((32, 3), (64, 32)):
        layers += [nn.Conv2d(before, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


def _encoder():
    layer = nn.TransformerEncoderLayer(256, 4, 1024, batch_first=True, activation="gelu")
    return nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)


def main() -> None:
    """Print the table."""
    torch.manual_seed(0)
    images, rows = torch.randn(4, 3, 32, 32), torch.randn(4, 64, 256)
    with fx.detect(env={}, device="cpu") as ctx, torch.no_grad():
        first, second = {}, {}
        for name, plan in PLANS.items():
            for form in ("", LAST) if plan.compile is None else ("",):
                net, x = _convolutions().eval(), images
                if form:
                    net, x = (one.to(memory_format=torch.channels_last) for one in (net, x))
                first[name + form] = _run(fx.wrap(net, ctx, plan), x, f"convolutions: {name}{form}")
            second[name] = _run(fx.wrap(_encoder().eval(), ctx, plan), rows, f"encoder: {name}")
        tell(f"measuring, about {2 * SECONDS} s")
        times = [for_seconds(runs, SECONDS) for runs in (first, second)]
    table = [[name, *_cells(times[0], name), *_cells(times[1], name)] for name in first]
    columns = ["plan", "convolutions, ms", "times as fast", "encoder, ms", "times as fast"]
    title = "Two convolutions, 4 images of 32 x 32; an encoder layer of width 256, 4 x 64 tokens"
    show(title, columns, table)


def _cells(times, name):
    if name not in times:
        return ["", ""]
    return [f"{1e3 * times[name] / CALLS:.2f}", f"{times['fp32'] / times[name]:.2f}"]


def _run(model, x, what):
    tell(what)

    def run() -> None:
        for _ in range(CALLS):
            model(x)

    model(x)  # compiles
    return run


if __name__ == "__main__":
    main()
