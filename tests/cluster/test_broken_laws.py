"""Laws of strategies catch a strategy that breaks them."""

import attrs
import pytest
import torch

import fxtrain as fx
from fxtrain.testing import Terms
from tests._slow import slow_after
from tests.cluster._laws import LAW

# A law that nothing breaks says nothing: what the last rank brings is changed a little.


@attrs.frozen
class _Tampered:
    """A pool whose last rank answers something else."""

    pool: object
    change: object

    @property
    def n(self):
        return self.pool.n

    def run(self, fn, *args):
        *others, last = self.pool.run(fn, *args)
        # A law on going on gets the run without a stop, and the rest after one.
        changed = (last[0], self.change(last[1])) if type(last) is tuple else self.change(last)
        return [*others, changed]


def _moved(name, by=1e-6):
    def change(run):
        moved = {**run.parameters, name: run.parameters[name] + by}
        return attrs.evolve(run, parameters=moved)

    return change


def _other(**fields):
    return lambda run: attrs.evolve(run, **fields)


def _late(run):
    return attrs.evolve(run, losses=[*run.losses[:-1], run.losses[-1] * (1 + 1e-6)])


def _seen(change):
    """Of two runs, the one whose weights were looked at."""
    return lambda run: change(run) if run.seen else run


def _other_weights(run):
    return attrs.evolve(run, seen={**run.seen, "gain": run.seen["gain"] + 1e-15})


BROKEN = [
    ("same_as_one_process", 2, _late, "losses are"),
    ("same_as_one_process", 2, _moved("gain"), "rank 1 of 2, gain"),
    ("same_in_micro_batches", 2, _other(parameters={}), "names differ"),
    ("same_by_tokens", 2, _moved("blocks.1.up.bias"), "rank 1 of 2, blocks.1.up.bias"),
    ("same_clipped", 2, _other(norms=[1.0] * 3), "norms are"),
    ("same_clipped", 2, _other(norms=[]), "norms are"),
    ("frozen_and_tied_stay", 2, _moved("position", 1e-13), "frozen parameter changed"),
    ("frozen_and_tied_stay", 2, _other(tied=False), "no longer tied"),
    ("overflow_skips_everywhere", 2, _other(applied=[True] * 3), "updates ran"),
    ("overflow_skips_everywhere", 2, _other(scale=2.0**10), "loss scale"),
    ("overflow_skips_everywhere", 2, _moved("gain"), "differs between ranks"),
    ("overflow_skips_everywhere", 2, _moved("gain", torch.inf), "not finite"),
    ("non_finite_skips_everywhere", 2, _other(applied=[True] * 3), "updates ran"),
    ("non_finite_skips_everywhere", 2, _moved("gain"), "rank 1 of 2, gain"),
    ("resumes_where_it_stopped", 2, _late, "uninterrupted"),
    ("resumes_where_it_stopped", 2, _moved("gain", 1e-15), "gain differs after resuming"),
    ("whole_weights_change_nothing", 2, _seen(_late), "without reading"),
    ("whole_weights_change_nothing", 2, _seen(_moved("gain", 1e-15)), "differs after reading"),
    ("whole_weights_change_nothing", 2, _seen(_other_weights), "gain was read with wrong values"),
    ("one_rank_is_the_loop", 1, _moved("gain", 1e-15), "differs from the reference"),
    ("unwrap_gives_the_module_back", 2, lambda changes: ["hooks"], "after unwrap: hooks"),
    ("all_at_once", 2, _late, "losses are"),
    ("all_at_once", 2, _other(norms=[1.0] * 3), "norms are"),
    ("all_at_once", 2, _moved("blocks.1.up.bias"), "rank 1 of 2, blocks.1.up.bias"),
    ("all_at_once", 2, _seen(_other_weights), "gain was another"),
]


def _first_of_each(cases):
    """The first case of each law; the others are slow."""
    seen = set()
    for case in cases:
        yield pytest.param(*case, marks=pytest.mark.slow) if case[0] in seen else case
        seen.add(case[0])


def test_terms_allow_what_they_say(pair):
    law = LAW["same_as_one_process"]
    law(_Tampered(pair, _moved("gain", 1e-6)), fx.Plan(), terms=Terms(atol=1e-5))
    with pytest.raises(AssertionError, match="rank 1 of 2, gain"):
        law(_Tampered(pair, _moved("gain", 1e-4)), fx.Plan(), terms=Terms(atol=1e-5))


@pytest.mark.parametrize(("name", "n", "change", "words"), slow_after(6, [*_first_of_each(BROKEN)]))
def test_a_broken_strategy_is_caught(clusters, name, n, change, words):
    with pytest.raises(AssertionError, match=words):
        LAW[name](_Tampered(clusters[n], change), fx.Plan())


def _wrong_unwrap(ctx, leave):
    """What the law on unwrap says of a strategy that leaves something behind."""
    import fxtrain.testing.laws as laws

    def unwrap(model):
        module = fx.unwrap(model)
        if leave == "hooks":
            module.norm.register_forward_hook(lambda *_: None)
        elif leave == "values":
            module.gain.data += 1.0
        elif leave == "ties":
            module.head.weight = torch.nn.Parameter(module.embed.weight.detach().clone())
        return module

    real, laws.unwrap = laws.unwrap, unwrap
    try:
        return laws._unwrapped(ctx, laws.Task(plan=fx.Plan()))
    finally:
        laws.unwrap = real


@pytest.mark.parametrize("leave", ["hooks", "values", "ties"])
def test_what_unwrap_leaves_behind_is_named(pair, leave):
    for changes in pair.run(_wrong_unwrap, leave):
        assert leave in changes
