"""Everything that is done with a model while and after it trains, on one tiny Llama."""

import safetensors.torch
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader

import fxtrain as fx
from fxtrain.testing.training import on_mesh
from tests.cluster._models import VOCABULARY, llama

PROMPT = torch.tensor([[1, 2, 3, 4]])


def rows():
    return torch.randint(0, VOCABULARY, (16, 8), generator=torch.Generator().manual_seed(1))


def loss(model, batch):
    """A target for each token by itself, so that sequences may be cut anywhere."""
    logits = model(input_ids=batch.data, use_cache=False).logits
    return F.cross_entropy(logits.flatten(0, 1), ((batch.data * 7 + 3) % VOCABULARY).flatten())


def adam(params):
    return torch.optim.AdamW(params, lr=0.01, weight_decay=0.1)


def write_halves(folder, dtype):
    """The files of a model whose values are half of those that training starts from."""
    net = llama().to(dtype)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.mul_(0.5)
    fx.export(net, folder)
    return str(folder)


def everything(ctx, options, mesh, other, folder, dtype):
    """What each operation gives, by its name; run on every rank."""
    with on_mesh(ctx, mesh) as placed:
        return _everything(placed, options, other, folder, dtype)


def _everything(ctx, options, other, folder, dtype):
    plan = fx.Plan(accumulate=2, clip_norm=0.5, batch="global", **options)
    net = llama().to(dtype)
    model = fx.wrap(net, ctx, plan, optimizer=adam)
    fns = fx.StepFns(model=model, loss=loss)
    loader = fx.shard(DataLoader(rows(), batch_size=4), ctx, plan)
    found = {"train": _train(ctx, loader, fns)}
    found["evaluate"] = _evaluate(ctx, loader, model)
    found["weights"] = _weights(model)
    found["gathered and generate"] = _generated(model)
    files = fx.export(model, f"{folder}/export")
    found["export"] = [file.name for file in files]
    with fx.gathered(model, ranks="main") as whole:
        if whole is not None:
            whole.save_pretrained(f"{folder}/pretrained")
    fx.save(f"{folder}/run", ctx, model, position=fx.Position()).result()
    found["train on"] = _train(ctx, loader, fns)
    fx.restore(f"{folder}/run", ctx, model)
    found["restore"] = _weights(model)
    found["train again"] = _train(ctx, loader, fns)
    fx.load_model(other, model)
    found["load_model"] = _weights(model)
    found["train from files"] = _train(ctx, loader, fns)
    found["weights at the end"] = _weights(model)
    found["generate of the module"] = _by_module(model)
    whole = fx.unwrap(model)
    assert whole is net
    found["unwrap"] = {name: value.clone() for name, value in whole.state_dict().items()}
    return found


def _train(ctx, loader, fns):
    """Losses over all ranks, and norms, of an epoch."""
    reports = [fx.step(ctx, batch, fns) for epoch in loader.epochs(1) for batch in epoch]
    losses = [float(fx.ops.reduce(report.loss, ctx)) for report in reports]
    return losses + [float(one.grad_norm) for one in reports if one.applied]


def _evaluate(ctx, loader, model):
    model.eval()
    with torch.no_grad():
        batches = [batch for epoch in loader.epochs(1) for batch in epoch]
        found = [float(fx.ops.reduce(loss(model, batch), ctx)) for batch in batches]
    model.train()
    return found


def _weights(model):
    return dict(fx.weights(model, device="cpu"))


def _generated(model):
    with fx.gathered(model) as net, torch.no_grad():
        state = {name: tensor.clone() for name, tensor in net.state_dict().items()}
        net.load_state_dict({name: torch.zeros_like(tensor) for name, tensor in state.items()})
        net.load_state_dict(state)  # as of weights of an average
        return net.generate(PROMPT, max_new_tokens=4, do_sample=False).tolist()


def _by_module(model):
    """What generate gives without whole weights, or says."""
    if model.ctx.mesh.context > 1:
        return "takes part of a sequence"
    try:
        with torch.no_grad():
            return model.module.generate(PROMPT, max_new_tokens=4, do_sample=False).tolist()
    except fx.errors.StepError as error:
        return str(error)


def compare_files(found, folder):
    """Check the files that `everything` wrote against the weights that it found."""
    for file in ("export/model.safetensors", "pretrained/model.safetensors"):
        stored = safetensors.torch.load_file(folder / file)
        assert stored.keys() == found[0]["weights"].keys()
        assert all(torch.equal(stored[n], t) for n, t in found[0]["weights"].items())


def compare(found, wanted, *, rtol, atol):
    """Check what every rank got against one process."""
    for one in found:
        assert one.keys() == wanted.keys()
        assert one["export"] == wanted["export"]
        for name in wanted.keys() - {"export", "generate of the module"}:
            if isinstance(wanted[name], dict):
                assert list(one[name]) == list(wanted[name]), name
            try:
                torch.testing.assert_close(one[name], wanted[name], rtol=rtol, atol=atol)
            except AssertionError as error:
                error.add_note(f"In {name!r}.")
                raise
        for name, tensor in one["unwrap"].items():
            assert torch.equal(tensor, one["weights at the end"][name]), name
