"""Text from a pipeline: transformers' `generate` on every rank, which caches its own layers.

Each rank runs the loop of `generate`. Where that calls the model, the stages run one after the
other, and the last one broadcasts the logits, so all ranks choose the same tokens. A rank caches
keys and values of the layers of its stages. Other layers of its cache hold none, and answer
questions about lengths as one of its own does.
"""

import copy
import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from fxtrain import ops
from fxtrain.backends.core.step_functions import same_text
from fxtrain.backends.pipeline.stage import Call, Stage, TensorMeta, probe
from fxtrain.errors import PlanError, StepError
from fxtrain.state import Wrapped

_GATHERED = "Use with fx.gathered(model) as net: net.generate(...)."

_Sends = Mapping[int, tuple[TensorMeta, ...]]


def generate(
    model: Wrapped, method: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Call a module's `generate` on all ranks of a pipeline, with equal arguments.

    Effects:
        For each call of the model, the tensors that stages pass on, and a broadcast of the logits.
        Random choices start from one seed, drawn on the first rank of the pipeline.

    Raises:
        CollectiveError: the ranks pass different arguments; on every rank.
        StepError: the model or its cache is not that of a decoder of transformers.
        PlanError: the stages are sharded, or the model cannot be split.
    """
    engine, module = model.engine, model.module
    if model.plan.strategy.stages is not None:
        raise PlanError(
            f"PP(stages=...): generate runs on the ranks of one pipeline, and these share their "
            f"stages with others. {_GATHERED}"
        )
    if getattr(getattr(module, "config", None), "is_encoder_decoder", False):
        raise StepError(f"PP: generate needs a decoder; found {type(module).__name__}. {_GATHERED}")
    refuse: Any = module.forward
    known: dict[Any, Any] = {}
    module.forward = functools.wraps(refuse)(functools.partial(_forward, model, known))
    try:
        with same_text(model, engine.axis, args, kwargs), ops.autocast(model):
            return method(*args, **kwargs)
    finally:
        module.forward = refuse


def _forward(model: Wrapped, known: dict[Any, Any], *args: Any, **kwargs: Any) -> Any:
    """One call of the model: its stages one after the other.

    Args:
        known: What stages send, and the kind of the outputs, by the shape of the tokens; mutable.
    """
    name = _own_layers_only(model, kwargs)
    cache = kwargs[name]
    given = (kwargs.get("input_ids"), kwargs.get("inputs_embeds"), *args)
    key = tuple(next(argument for argument in given if isinstance(argument, Tensor)).shape)
    if key not in known:
        known[key] = [_sends(model, (args, kwargs), name), None]
    sends, form = known[key]
    out = _through_stages(model, (args, kwargs), name, sends)
    engine = model.engine
    if form is None:
        facts = None
        if out is not None:
            kept = [field for field, value in out.items() if hasattr(value, "get_mask_sizes")]
            facts = (type(out), kept, tuple(out.logits.shape), out.logits.dtype)
        form = known[key][1] = ops.broadcast_object(facts, engine.axis, src=engine.source)
    assert form is not None  # the last stage's rank broadcasts one
    kind, kept, shape, dtype = form
    logits = torch.empty(shape, dtype=dtype, device=model.ctx.device) if out is None else out.logits
    logits = ops.broadcast(logits, engine.axis, src=engine.source)
    return kind(logits=logits, **dict.fromkeys(kept, cache))


def _through_stages(model: Wrapped, call: Call, name: str, sends: _Sends) -> Any:
    """Run this rank's stages; the outputs, on the rank of the last one."""
    engine = model.engine
    owners, me = engine.partition.ranks, engine.axis.rank
    ranks, group = engine.axis.comm.ranks, engine.axis.comm.group
    carried: tuple[Tensor, ...] = ()
    for number, owner in enumerate(owners):
        if owner != me:
            continue
        if number and owners[number - 1] != me:
            carried = tuple(
                torch.empty(meta.shape, dtype=meta.dtype, device=model.ctx.device)
                for meta in sends[number - 1]
            )
            for tensor in carried:
                dist.recv(tensor, ranks[owners[number - 1]], group)
        view = _view(call[1][name], _layers_of(engine.stages[number]))
        arguments = (call[0], {**call[1], name: view})
        ended, out = engine.stages[number].visit(arguments, carried, sends.get(number, ()))
        if ended:
            return out
        carried = out
        if owners[number + 1] != me:
            for tensor in carried:
                dist.send(tensor, ranks[owners[number + 1]], group)
    return None


def _sends(model: Wrapped, call: Call, name: str) -> _Sends:
    """What each stage sends for arguments of this kind, found without values."""
    engine = model.engine
    args, kwargs = call
    cache = kwargs[name]
    local_probes = {}
    for number, stage in engine.stages.items():
        apart = _view(cache, _layers_of(stage))
        apart.layers = [copy.copy(layer) for layer in apart.layers]  # tensors are not changed
        local_probes[number] = probe(stage, (args, {**kwargs, name: apart}), model.ctx)
    probes: dict[int, Any] = {}
    for probes_of_rank in ops.gather_objects(local_probes, engine.axis):
        probes.update(probes_of_rank)
    for number, probed in sorted(probes.items()):
        if probed.problem is not None:
            raise PlanError(f"PP cannot generate through stage {number}: {probed.problem}.")
    return {number: probes[number + 1].needs for number in range(len(engine.partition.ranks) - 1)}


class _Elsewhere:
    """The cache of a layer of another stage: no values, and the lengths of a layer of this one."""

    def __init__(self, layer: Any, own: Any) -> None:
        self.is_sliding, self.own = getattr(layer, "is_sliding", False), own

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "own":
            raise AttributeError(name)
        return getattr(self.own, name)

    def update(self, keys: Tensor, values: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Keys and values of the full length, as shapes only: those passed are fake."""
        length = self.own.get_mask_sizes(keys.shape[-2])[0]
        return tuple(  # type: ignore[return-value]
            tensor.new_empty(*tensor.shape[:-2], length, tensor.shape[-1])
            for tensor in (keys, values)
        )

    def _nothing(self, *_: Any, **__: Any) -> None:
        """There is nothing to reorder, cut or repeat."""

    reorder_cache = crop = reset = batch_repeat_interleave = batch_select_indices = _nothing
    offload = prefetch = _nothing


def _own_layers_only(model: Wrapped, kwargs: Mapping[str, Any]) -> str:
    """The argument that is the cache, which afterwards holds only layers of this rank's stages."""
    names = [n for n, value in kwargs.items() if hasattr(value, "get_mask_sizes")]
    cache: Any = kwargs[names[0]] if names else None
    layers = getattr(cache, "layers", None)
    own = {layer for stage in model.engine.stages.values() for layer in _layers_of(stage)}
    if any(kwargs.get(f"output_{name}") for name in ("attentions", "hidden_states")):
        raise StepError("PP: generate returns tokens and logits, no attentions or hidden states.")
    grows = not getattr(cache, "is_compileable", False) and not getattr(cache, "offloading", False)
    if not own or not isinstance(layers, list) or max(own) >= len(layers) or not grows:
        raise StepError(
            f"PP: generate needs a DynamicCache with one entry per layer, which decoders of "
            f"transformers create with use_cache=True; found {type(cache).__name__}. {_GATHERED}"
        )
    cache.layers = _view(cache, own).layers
    return names[0]


def _layers_of(stage: Stage) -> set[int]:
    """The numbers of the layers whose keys and values a stage computes."""
    numbers: set[int] = set()
    for part in stage.shell.modules():
        number: Any = getattr(part, "layer_idx", None)
        if isinstance(number, int) and stage.owns(part):
            numbers.add(number)
    return numbers


def _view(cache: Any, own: set[int]) -> Any:
    """A cache with the same entries for some layers, and none for the others.

    A stage sees its own layers only: those of an earlier stage of this rank are one call ahead.
    """
    view = copy.copy(cache)
    view.layers = [
        layer if index in own else _Elsewhere(layer, cache.layers[min(own)])
        for index, layer in enumerate(cache.layers)
    ]
    return view
