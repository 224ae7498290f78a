"""Streamed models: what is shared, what changes behind their back, and what is left behind."""

import copy
import gc
import pickle

import attrs
import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

import fxtrain as fx
from fxtrain.backends.offload.strategy import OFFLOAD
from fxtrain.backends.offload.streaming import DeviceCopies
from fxtrain.state import Unit
from fxtrain.testing import Transformer
from tests._errors import raises_code
from tests._slow import slow_after
from tests.offload._streamed import BLOCKS, COPIES, TOKENS, empty, placement, streamed


def test_an_empty_model_is_filled_by_load_model(ctx, folder):
    model = fx.wrap(empty(), ctx, fx.Plan(strategy=fx.Offload(placement=BLOCKS)))
    with raises_code("FX600", "load_model"):
        model(TOKENS)
    changed = {f"net.{name}": value for name, value in Transformer().state_dict().items()}
    fx.export(changed, folder.parent / "other")
    fx.load_model(folder.parent / "other", model, prefix="net.")
    assert torch.equal(model(TOKENS), Transformer()(TOKENS))
    assert model.module.head.weight is model.module.embed.weight


def test_a_model_that_is_wholly_resident_has_no_hooks(ctx, folder):
    model = streamed(ctx, folder, placed=placement())
    assert torch.equal(model(TOKENS), Transformer()(TOKENS))
    assert not any(
        part._forward_pre_hooks or part._forward_hooks for part in model.module.modules()
    )


@pytest.mark.parametrize("row", [OFFLOAD, COPIES], ids=["in place", "copied"])
def test_unwrap_ends_threads_and_gives_back_a_whole_module(ctx, folder, row, threads):
    net = Transformer()
    parts = [vars(part).keys() for part in net.modules()]
    before = [len(keys) for keys in parts]
    model = streamed(ctx, folder, row=row, net=net)
    model(TOKENS)
    assert threads()
    assert fx.unwrap(model) is net
    assert not threads()
    assert [len(vars(part)) for part in net.modules()] == before
    assert all(parameter.requires_grad for parameter in net.parameters())
    assert torch.equal(net.double()(TOKENS), Transformer()(TOKENS))


def test_files_are_let_go_of_with_the_module(ctx, folder):
    def maps():
        with open("/proc/self/maps") as file:
            return sum(str(folder) in line for line in file)

    model = streamed(ctx, folder)
    model(TOKENS)
    assert maps() == 1
    fx.unwrap(model)
    del model
    gc.collect()
    assert maps() == 0


def test_a_dropped_model_ends_its_threads(ctx, folder, threads):
    model = streamed(ctx, folder)
    model(TOKENS)
    del model
    gc.collect()
    for one in threads():
        one.join(10)
    assert not threads()


def test_tensors_that_are_not_aligned_are_written_once(ctx, tmp_path):
    file, at = tmp_path / "model.safetensors", tmp_path / "units"
    values = Transformer().state_dict()
    save_file({name: one for name, one in values.items() if name != "head.weight"}, file)
    raw = file.read_bytes()
    size = int.from_bytes(raw[:8], "little")
    header = raw[8 : 8 + size].rstrip()
    header += b" " * (-len(header) % 16)  # so the values begin at 8 bytes after a multiple of 16
    file.write_bytes(len(header).to_bytes(8, "little") + header + raw[8 + size :])
    config = fx.Offload(placement=BLOCKS, source=str(file), offload_folder=str(at))
    model = fx.wrap(empty(), ctx, fx.Plan(strategy=config))
    assert torch.equal(model(TOKENS), Transformer()(TOKENS))
    assert list(at.iterdir())


def test_two_models_of_one_folder(ctx, folder):
    one, other = streamed(ctx, folder), streamed(ctx, folder, placement("blocks.1", "embed"))
    wanted = Transformer()(TOKENS)
    for _ in range(2):
        assert torch.equal(one(TOKENS), wanted) and torch.equal(other(TOKENS), wanted)
    fx.unwrap(one)
    assert torch.equal(other(TOKENS), wanted)


def test_weights_used_by_attribute_are_right(ctx, folder):
    class Scores(nn.Module):
        """Calls a function of a part rather than the part, and uses a weight directly."""

        def __init__(self, net):
            super().__init__()
            self.net = net

        def forward(self, tokens):
            x = self.net.embed(tokens)
            x = self.net.blocks[0].attention.forward(x)
            return x @ self.net.head.weight.T @ self.net.blocks[1].up.weight.new_ones(24, 2)

    fx.export(Scores(Transformer()), folder.parent / "scores")
    placed = placement("net.blocks.0", "net.blocks.1", "net.head", "net.embed")
    model = streamed(ctx, folder.parent / "scores", placed, net=Scores(empty()))
    with torch.no_grad():
        assert torch.equal(model(TOKENS), Scores(Transformer())(TOKENS))


def _other(folder):
    torch.manual_seed(1)
    net = Transformer()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.normal_()
    fx.export(net, folder)
    return net


@pytest.mark.parametrize("row", [OFFLOAD, COPIES], ids=["in place", "copied"])
@pytest.mark.parametrize("same_folder", slow_after(1, [True, False]))
def test_loading_again_replaces_what_was_read_ahead(ctx, folder, tmp_path, row, same_folder):
    model = streamed(ctx, folder, row=row, offload_folder=str(tmp_path / "units"))
    for _ in range(2):
        model(TOKENS)
    at = folder if same_folder else tmp_path / "other"
    other = _other(at)
    fx.load_model(at, model)
    for _ in range(2):
        assert torch.equal(model(TOKENS), other(TOKENS))
    fx.load_model(Transformer().state_dict(), model)
    for _ in range(2):
        assert torch.equal(model(TOKENS), Transformer()(TOKENS))


@pytest.mark.parametrize("row", [OFFLOAD, COPIES], ids=["in place", "copied"])
def test_load_state_dict_leaves_values_of_files_alone(ctx, folder, row):
    model = streamed(ctx, folder, row=row)
    model(TOKENS)
    state = {name: value + 1 for name, value in model.module.state_dict().items()}
    for part, some in (
        (model.module, state),
        (model.module.blocks[0].up, {"weight": state["blocks.0.up.weight"]}),
    ):
        with raises_code("FX200", "fx.load_model(state_dict"):
            part.load_state_dict(some, strict=False)
    assert torch.equal(model(TOKENS), Transformer()(TOKENS))
    fx.unwrap(model).load_state_dict(state)


def test_a_copy_of_a_streamed_model_is_one_of_its_weights(ctx, folder):
    model = streamed(ctx, folder)
    for copied in (copy.deepcopy, pickle.dumps):
        with raises_code("FX200", "fx.gathered(model)"):
            copied(model.module)
    with fx.gathered(model) as net:
        other = copy.deepcopy(net)
    fx.unwrap(model)
    assert torch.equal(other(TOKENS), Transformer()(TOKENS))


class Rotated(nn.Module):
    """A layer with a buffer that no file has."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("angles", torch.arange(4.0), persistent=False)

    def forward(self, x):
        return self.layer(x) + self.angles


@pytest.mark.parametrize("row", [OFFLOAD, COPIES], ids=["in place", "copied"])
def test_buffers_that_no_file_has_stream_too(ctx, tmp_path, row):
    torch.manual_seed(0)
    net = nn.Sequential(Rotated(), Rotated())
    fx.export(net, tmp_path / "model")
    meta = fx.big.empty(lambda: nn.Sequential(Rotated(), Rotated()))
    placed = placement("0", "1", offload_buffers=True)
    config = fx.Offload(placement=placed, source=str(tmp_path / "model"))
    with raises_code("FX200", "'0.angles'", "offload_folder"):
        fx.wrap(meta, ctx, fx.Plan(strategy=config), strategy=row)
    config = attrs.evolve(config, offload_folder=str(tmp_path / "units"))
    model = fx.wrap(meta, ctx, fx.Plan(strategy=config), strategy=row)
    x = torch.randn(2, 4)
    for _ in range(2):
        assert torch.equal(model(x), net(x))


def test_whole_weights_and_an_export_of_a_streamed_model(ctx, folder, tmp_path):
    model = streamed(ctx, folder)
    for name, value in fx.weights(model):
        assert torch.equal(value, Transformer().state_dict()[name])
    fx.export(model, tmp_path / "again")
    fx.load_model(tmp_path / "again", net := Transformer(seed=3))
    assert torch.equal(net(TOKENS), model(TOKENS))


def test_a_model_in_memory_is_written_once(ctx, tmp_path):
    at = tmp_path / "deep" / "offload"
    config = fx.Offload(placement=BLOCKS, offload_folder=str(at))
    seen = []
    for _ in range(2):
        model = fx.wrap(Transformer(), ctx, fx.Plan(strategy=config))
        assert torch.equal(model(TOKENS), Transformer()(TOKENS))
        fx.unwrap(model)
        seen.append({path.name: path.stat().st_mtime_ns for path in at.iterdir()})
    assert seen[0] == seen[1] and seen[0]
    damaged = sorted(at.iterdir())[0]
    damaged.write_bytes(damaged.read_bytes()[:-8] + bytes(8))
    model = fx.wrap(Transformer(), ctx, fx.Plan(strategy=config))
    assert torch.equal(model(TOKENS), Transformer()(TOKENS))


def test_pickled_weights_and_other_dtypes_pass_through_the_offload_folder(ctx, tmp_path):
    torch.save(Transformer().state_dict(), tmp_path / "model.bin")
    placed = attrs.evolve(BLOCKS, dtypes=(("blocks.1.up.*", "bfloat16"),))
    with raises_code("FX200", "offload_folder"):
        streamed(ctx, tmp_path / "model.bin", placed)
    model = streamed(ctx, tmp_path / "model.bin", placed, offload_folder=str(tmp_path / "offload"))
    rounded = Transformer().blocks[1].up.weight.bfloat16()
    assert torch.equal(model.module.blocks[1].up.weight, rounded)
    assert list((tmp_path / "offload").iterdir())


def test_an_optimizer_over_streamed_parameters_is_refused(ctx, folder):
    config = fx.Offload(placement=BLOCKS, source=str(folder))
    with raises_code("FX200", "requires_grad_(False)") as error:
        fx.wrap(Transformer(), ctx, fx.Plan(strategy=config), optimizer=torch.optim.SGD)
    assert "'" not in str(error.value).split(":")[0]
    assert "blocks.0.norm_1.weight" in str(error.value)


MOVES = {
    "to": lambda net: net.to("cpu"),
    "half": lambda net: net.half(),
    "a part": lambda net: net.blocks.cpu(),
}


@pytest.mark.parametrize("move", MOVES.values(), ids=MOVES)
def test_moving_a_streamed_model_says_what_to_do(ctx, folder, move):
    model = streamed(ctx, folder)
    with raises_code("FX200", "placement"):
        move(model.module)


def test_placements_that_do_not_fit_the_model_or_the_machine(ctx):
    def refusal(placed):
        with pytest.raises(fx.PlanError) as error:
            fx.wrap(Transformer(), ctx, fx.Plan(strategy=fx.Offload(placement=placed)))
        return str(error.value)

    assert "no module or tensor 'layers.0'" in refusal(placement("layers.0"))
    lacks = fx.state.Placement(units=(Unit(name="blocks", device="cpu"),))
    assert "does not cover tensor 'position'" in refusal(lacks)
    assert "it computes on 'cuda:3'" in refusal(attrs.evolve(BLOCKS, device="cuda:3"))
    units = (Unit(name="", device="cuda:7"),)
    assert "places units on 'cuda:7', and this machine has" in refusal(
        fx.state.Placement(units=units)
    )


def test_memory_of_a_device_that_is_not_there(ctx, folder):
    config = fx.Offload(memory={"cuda:7": "1GiB", "cpu": "1GiB"}, source=str(folder))
    with raises_code("FX200", "Offload(memory=", "'cuda:7'"):
        fx.wrap(empty(), ctx, fx.Plan(strategy=config))


def test_copies_are_bounded_also_while_gradients_are_computed(ctx, folder, monkeypatch):
    """Autograd keeps no copy of a unit alive: only those in use and read ahead."""
    made, fetch = [], DeviceCopies.fetch

    def counted(self, unit):
        fetched = fetch(self, unit)
        made.append(StorageWeakRef(fetched[0].untyped_storage()))
        return fetched

    monkeypatch.setattr(DeviceCopies, "fetch", counted)
    net = Transformer(blocks=6)
    net.blocks.requires_grad_(False)
    fx.export(net, folder)
    placed = placement(*(f"blocks.{number}" for number in range(6)))
    config = fx.Offload(placement=placed, source=str(folder), prefetch=1)
    model = fx.wrap(net, ctx, fx.Plan(strategy=config), optimizer=_sgd, strategy=COPIES)
    loss = model(TOKENS).sum()
    assert len(made) >= 6 and sum(not one.expired() for one in made) <= 2
    loss.backward()
    assert len(made) >= 11 and sum(not one.expired() for one in made) <= 2
    assert net.gain.grad is not None


def _sgd(params):
    return torch.optim.SGD(params, lr=0.1)


def test_the_placement_that_was_chosen_can_be_read_after_wrapping():
    strategy = fx.Offload(memory={"cpu": "2GiB"})
    with fx.detect(env={}, device="cpu") as ctx:
        net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)).eval()
        model = fx.wrap(net, ctx, fx.Plan(strategy=strategy))
        assert model.placement == fx.big.place(fx.big.sizes(net), fx.big.budget({"cpu": "2GiB"}))
        again = fx.Plan(strategy=fx.Offload(placement=model.placement))
        assert fx.wrap(fx.unwrap(model), ctx, again).placement == model.placement
        assert fx.wrap(torch.nn.Linear(1, 1), ctx).placement is None
