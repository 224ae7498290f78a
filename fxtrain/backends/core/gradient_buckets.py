"""torch's DistributedDataParallel, with buckets that a restart does not change."""

import re
from collections.abc import Callable, Sequence
from functools import partial
from operator import attrgetter
from typing import Any

import attrs
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from fxtrain import _tree
from fxtrain.errors import StepError
from fxtrain.ops.collectives import broadcast_packed
from fxtrain.ops.transport.exchange import compare_calls
from fxtrain.ops.transport.packing import pack
from fxtrain.state import DistContext

_REQUIRES_GRAD = attrgetter("requires_grad")
_NAMED = 5  # how many names a message lists


@attrs.define(eq=False)
class _Progress:
    """How far a forward and its backward are; torch's modules are slow to set attributes of.

    Attributes:
        in_block: Whether inside an `ops.sync` that reduces.
        expects: Whether the reducer expects a backward.
        undecided: Whether there was a forward that the reducer does not know of.
        ordered: Whether the buckets follow the order of gradients, or keep that of registration.
    """

    in_block: bool = False
    expects: bool = False
    undecided: bool = False
    ordered: bool = True


class StableBucketsDDP(DistributedDataParallel):
    """torch's wrapper, with buckets that a restart does not change.

    After the first backward, torch rebuilds its buckets in the order in which gradients were
    ready. The place of a gradient in its bucket decides the order in which the ranks' values are
    added, and so its last bit: a resumed run, whose first backward would still use the old
    buckets, would differ. Here the first backward that reduces already uses the order of the
    gradients, which is known from its graph. A graph that lacks a parameter, such as one with
    reentrant checkpoints, leaves the order last registered first.

    torch decides in forward whether the backward that follows reduces gradients. Outside of
    `ops.sync`, forward cannot know whether its micro-batch ends a window, so that there the
    decision is made when backward begins.

    torch reduces the parameters that required a gradient when it was constructed. Here that may
    change: the next forward builds the buckets for those that require one by then.
    """

    add_hook: Callable[..., None] | None = None  # adds the communication hook
    data: DistContext | None = None  # over whose ranks gradients are averaged
    hook_state: Any = None  # of the communication hook
    _uses_all = False  # whether every backward has to reach all parameters
    orders = False  # whether buckets are sorted in the first backward
    # Of trained parameters, as registered, by when backward reaches them.
    _order: Sequence[int] = ()

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # torch's first buckets are for parameters in the order of their use, those of
        # `fix_buckets` for the order of their gradients.
        self._fixed = not (kwargs["static_graph"] or kwargs["find_unused_parameters"])
        super().__init__(*args, **kwargs)
        self.progress = _Progress()

    def _build_params_for_reducer(self) -> Any:
        self._trained = {p: p.requires_grad for p in self.module.parameters()}
        parameters, sparse = super()._build_params_for_reducer()
        if not self._fixed:
            return parameters, sparse
        # Backward usually reaches what was registered last first.
        places = self._order or range(len(parameters))[::-1]
        self._sorted = [parameters[place] for place in places]
        return self._sorted, [sparse[place] for place in places]

    def register_comm_hook(self, state: object, hook: Callable[[object, Any], Any]) -> None:
        """As torch's; the hook stays when the buckets are built again."""
        super().register_comm_hook(state, hook)
        if self.add_hook is None:
            register = DistributedDataParallel.register_comm_hook
            self.add_hook = partial(register, state=state, hook=hook)

    def fix_buckets(self) -> None:
        self.reducer._push_all_rebuilt_params()
        self._has_rebuilt_buckets = self.reducer._rebuild_buckets()
        self._uses_all = True

    def _build_reducer(self) -> None:
        parameters, sparse = self._build_params_for_reducer()
        known = {parameter: name for name, parameter in self.module.named_parameters()}
        names = {place: known[parameter] for place, parameter in enumerate(parameters)}
        self._ddp_init_helper(parameters, sparse, names, self.static_graph)
        self._has_rebuilt_buckets = False
        if self.add_hook is not None:
            self.add_hook(self)
        if self._uses_all:
            self.fix_buckets()

    def _order_buckets(self, roots: list[Tensor]) -> None:
        """Sort the buckets by when backward computes the gradients on rank 0.

        Effects:
            One broadcast of a number per parameter, and torch's comparison of buckets if the order
            is not that of registration.
        """
        self.progress.ordered = True
        registered = list(range(len(self._sorted)))[::-1]
        computed = _gradient_order(roots, self._sorted)
        ready = [registered[place] for place in computed] if computed else registered
        order = torch.tensor(ready, dtype=torch.int32, device="cpu")
        if self.data is not None:
            order = broadcast_packed("backward", pack(order), self.data, 0)
        self._order = order.tolist()
        if self._order != registered:
            self._build_reducer()

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            # Past torch's forward, in which the ranks wait for each other.
            self.sync_buffers_once()
            return self.module(*inputs, **kwargs)
        self._check_reduced()
        if changed := self._changed():
            self._change_parameters(changed)
        progress = self.progress
        # What a search for unused parameters starts from is the loss, which several forwards may
        # contribute to; each forward would start it from its own outputs.
        searches = self.find_unused_parameters and not self.static_graph
        known = progress.in_block and progress.ordered and not searches
        if known or not self.require_backward_grad_sync:
            progress.expects, progress.undecided = progress.in_block, False
            return super().forward(*inputs, **kwargs)
        # Undecided: if the reducer expected a backward that never comes, torch's next forward would
        # raise an error.
        with self.no_sync():
            out = super().forward(*inputs, **kwargs)
        self._decide_in_backward(out)
        return out

    def _changed(self) -> list[nn.Parameter]:
        """The parameters that did not require a gradient and do now, and the reverse.

        None if no parameter requires one now: a model may be frozen while another one is trained
        through it.
        """
        before = self._trained
        now = list(map(_REQUIRES_GRAD, before))
        if now == list(before.values()) or not any(now):
            return []
        return [parameter for parameter in before if parameter.requires_grad != before[parameter]]

    def _change_parameters(self, changed: list[nn.Parameter]) -> None:
        """Reduce the parameters that require a gradient now, as after torch's constructor.

        Effects:
            One exchange of packets, and torch's comparison of buckets.

        Raises:
            StepError: the graph is static, or the change is inside an accumulation window.
            CollectiveError: the ranks changed other parameters.
        """
        known = {p: name for name, p in self.module.named_parameters()}
        names = ", ".join(known.get(p, "a removed one") for p in changed[:_NAMED])
        if self.static_graph:
            raise StepError(
                f"requires_grad of {names} changed after fx.wrap, and DDP(static_graph=True) needs "
                f"the same graph in every step. Use static_graph=False.",
                code="FX505",
            )
        if any(parameter.grad is not None for parameter in changed if not parameter.requires_grad):
            raise StepError(
                f"requires_grad_(False) on {names} inside an accumulation window, whose gradients "
                f"are not reduced yet. Call it after an update.",
                code="FX505",
            )
        if self.data is not None:
            compare_calls(self.data, ("forward", f"requires_grad changed: {names}"))
        self._order, self.progress.ordered = (), not self.orders
        self._build_reducer()

    def before_backward(self, loss: Tensor) -> None:
        """Have the reducer expect this backward, unless forward did or nothing is reduced."""
        if self.require_backward_grad_sync and not self.progress.expects:
            self._expect([loss])
        self.progress.expects = self.progress.undecided = False

    def _decide_in_backward(self, out: Any) -> None:
        """Make a `loss.backward()` outside of a step reduce gradients."""
        leaves = _tree.flatten(out)[0]
        outputs = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.grad_fn is not None]
        self.progress.undecided = bool(outputs)
        if not outputs:  # that are found
            self._expect([])
            return
        searched = self.find_unused_parameters or not self.progress.ordered
        roots = list(outputs) if searched else []

        def begins(_: Tensor) -> None:
            if self.progress.undecided and self.require_backward_grad_sync:
                self._expect(roots)
            self.progress.undecided = False
            roots.clear()  # they hold this function

        # Backward passes the outputs before it reaches any parameter.
        for leaf in outputs:
            leaf.register_hook(begins)

    def _expect(self, roots: list[Tensor]) -> None:
        if not self.progress.ordered:
            self._order_buckets(roots)
        self.reducer.prepare_for_forward()
        self.require_forward_param_sync = True
        searched = self.find_unused_parameters and not self.static_graph
        self.reducer.prepare_for_backward(roots if searched else [])

    def finish_reduction(self) -> None:
        """End a backward: check that gradients were reduced, and send rank 0's buffers to all.

        torch would send them in the next forward of any kind, on all ranks. Sent here, where all
        ranks participate, they are also equal when one rank evaluates by itself.
        """
        self._check_reduced()
        self.sync_buffers_once()

    def sync_buffers_once(self) -> None:
        """Send rank 0's buffers now, if a backward outside of fxtrain left that to do."""
        if self.will_sync_module_buffers():
            self._sync_buffers()
            self.require_forward_param_sync = False

    def _check_reduced(self) -> None:
        if not self._uses_all:
            return
        try:
            self.reducer._rebuild_buckets()  # done already, except for this check
        except RuntimeError as error:
            raise _not_reduced(self.module, self._sorted, str(error)) from error


class Reduced:
    """The region of a forward and backward whose gradients are reduced."""

    def __init__(self, engine: StableBucketsDDP) -> None:
        self._engine = engine

    def __enter__(self) -> None:
        self._engine.progress.in_block = True

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self._engine.progress.in_block = False
        if kind is None:
            self._engine.finish_reduction()


def _gradient_order(roots: list[Tensor], parameters: Sequence[Tensor]) -> list[int]:
    """The places of parameters in the order in which backward computes their gradients.

    Autograd runs the operators that are ready from the latest of forward to the earliest. Empty
    if the graph lacks a parameter.
    """
    earliest: dict[Any, int] = {}  # by parameter, the operator that backward reaches last
    waiting = [root.grad_fn for root in roots if root.grad_fn is not None]
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        for follows, _ in node.next_functions:
            parameter = getattr(follows, "variable", None)
            if parameter is not None:
                number = node._sequence_nr()
                earliest[parameter] = min(number, earliest.get(parameter, number))
            elif follows is not None and follows not in seen:
                seen.add(follows)
                waiting.append(follows)
    if not all(parameter in earliest for parameter in parameters):
        return []
    return sorted(range(len(parameters)), key=lambda place: -earliest[parameters[place]])


def _not_reduced(
    module: nn.Module, parameters: Sequence[nn.Parameter], torch_says: str
) -> StepError:
    known = {p: name for name, p in module.named_parameters()}
    names = [known[p] for p in parameters if p in known]
    match = re.search(r"did not receive grad for rank \d+: ([\d ]+)", torch_says)
    unused = [names[int(place)] for place in match[1].split()] if match else []
    return StepError(
        f"DDP averages the gradients of all parameters, but this backward reached "
        f"{len(names) - len(unused) if unused else 'only some'} of {len(names)}. Without "
        f"gradient: {', '.join(unused[::-1][:10]) or 'unknown'}. Use "
        f"fx.DDP(unused_parameters=True), or requires_grad_(False) on those that no loss uses.",
        code="FX503",
    )
