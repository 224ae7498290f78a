"""Any number of threads: each on a copy of the context of its own, or refused by name."""

import threading

import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from fxtrain import CollectiveError, ops

ON_RANKS = settings(
    max_examples=15, deadline=None, phases=[Phase.explicit, Phase.reuse, Phase.generate]
)


def _work(ctx, mark, calls):
    """The largest of what the ranks pass to each call, or which thread was refused."""
    found = []
    for i in range(calls):
        try:
            passed = torch.full((4,), float(mark + 10 * i + ctx.rank))
            found.append(ops.reduce(passed, ctx, op="max").tolist())
        except CollectiveError as error:
            found.append("refused" if "ops.duplicate(ctx)" in str(error) else str(error))
    return found


def _in_threads(ctx, own, calls):
    copies = [ops.duplicate(ctx) if mine else ctx for mine in own]
    found = [None] * len(own)

    def run(place):
        found[place] = _work(copies[place], 1000 * (place + 1), calls)

    threads = [threading.Thread(target=run, args=(place,)) for place in range(len(own))]
    for thread in threads:
        thread.start()
    here = _work(ctx, 0, calls)
    for thread in threads:
        thread.join()
    return found, here


@ON_RANKS
@given(own=st.lists(st.booleans(), max_size=4), calls=st.integers(1, 6))
def test_threads_never_see_each_others_values(cluster, own, calls):
    def right(mark):
        return [[float(mark + 10 * i + cluster.n - 1)] * 4 for i in range(calls)]

    for found, here in cluster.run(_in_threads, own, calls):
        assert here == right(0)
        for place, mine in enumerate(own):
            alone = cluster.n == 1  # where nothing travels
            allowed = right(1000 * (place + 1)) if mine or alone else ["refused"] * calls
            assert found[place] == allowed
