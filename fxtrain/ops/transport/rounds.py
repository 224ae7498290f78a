"""Which rank sends what to which one, so that all of them hear of all others in few rounds.

In each round, a rank sends one message and receives one at most. The schedules are functions of the
rank and the number of ranks alone, so that every rank knows what the others send without asking.
They need ⌈log2 N⌉ rounds, one of them a round more, and each rank talks to two others per round at
most.
"""

import functools

import attrs


@attrs.frozen(kw_only=True)
class MessageRound:
    """What one rank sends and receives in one round; the rows are those of its buffer.

    Attributes:
        to: The rank to which it sends; None if it sends nothing.
        sent: First row that it sends, and the one after the last.
        source: The rank from which it receives; None if it receives nothing.
        received: First row that arrives, and the one after the last.
    """

    to: int | None = None
    sent: tuple[int, int] = (0, 0)
    source: int | None = None
    received: tuple[int, int] = (0, 0)


def count_rounds(ranks: int) -> int:
    """The number of rounds of every schedule but `reduce_rounds`: ⌈log2 ranks⌉."""
    return (ranks - 1).bit_length()


@functools.lru_cache(maxsize=64)
def gather_rounds(rank: int, ranks: int) -> tuple[MessageRound, ...]:
    """All ranks get a row of each one, in Bruck's algorithm.

    Row i of a rank's buffer is that of the rank i places after it, so its own comes first. Before
    the round of distance d it has the first d rows.
    """
    rounds: list[MessageRound] = []
    for distance in _distances(ranks):
        more = min(distance, ranks - distance)
        rounds.append(
            MessageRound(
                to=(rank - distance) % ranks,
                sent=(0, more),
                source=(rank + distance) % ranks,
                received=(distance, distance + more),
            )
        )
    return tuple(rounds)


@functools.lru_cache(maxsize=64)
def combine_rounds(rank: int, ranks: int) -> tuple[MessageRound, ...]:
    """All ranks get one row that combines those of all, for example their maximum.

    In round k a rank sends row k, which combines 2^k ranks, and receives one row after the first
    ⌈log2 ranks⌉ + 1. Both together are row k + 1. A rank may count twice, so combining a row with
    one that it contains must not change it.
    """
    total = count_rounds(ranks) + 1
    return tuple(
        attrs.evolve(each, sent=(k, k + 1), received=(total + k, total + k + 1))
        for k, each in enumerate(gather_rounds(rank, ranks))
    )


@functools.lru_cache(maxsize=64)
def reduce_rounds(rank: int, ranks: int) -> tuple[MessageRound, ...]:
    """All ranks get one row that combines that of each once, in an order equal on all of them.

    Two ranks combine what each has, in each round. Where the number of ranks is not a power of two,
    some of them first add the row of the rank after them, and give it the result in the last round.

    In round k a rank sends row k, and receives a row to combine with it, that of the lower rank
    first: row k + 1 is both, or row k where nothing arrives. Rows arrive after the first R + 1 of
    R rounds, except the result, which is row R.
    """
    pairs = ranks - (1 << ranks.bit_length() - 1)  # ranks that add the row of the one after them
    place = rank // 2 if rank < 2 * pairs else rank - pairs
    adds, waits = rank < 2 * pairs and not rank % 2, rank < 2 * pairs and rank % 2 == 1
    rounds: list[MessageRound] = []
    if pairs:
        rounds.append(
            MessageRound(to=rank - 1 if waits else None, source=rank + 1 if adds else None)
        )
    for distance in _distances(ranks - pairs):
        other = place ^ distance
        other = 2 * other if other < pairs else other + pairs
        rounds.append(MessageRound() if waits else MessageRound(to=other, source=other))
    if pairs:
        rounds.append(
            MessageRound(to=rank + 1 if adds else None, source=rank - 1 if waits else None)
        )
    total = len(rounds)
    for k, each in enumerate(rounds):
        row = total if waits else total + 1 + k
        rounds[k] = attrs.evolve(each, sent=(k, k + 1), received=(row, row + 1))
    return tuple(rounds)


def spread_rounds(rank: int, ranks: int, src: int) -> tuple[MessageRound, ...]:
    """All ranks get the one row of a source, along a binomial tree."""
    place, rounds = (rank - src) % ranks, list[MessageRound]()
    for distance in _distances(ranks):
        if place < distance and place + distance < ranks:
            to = (rank + distance) % ranks
            rounds.append(MessageRound(to=to, sent=(0, 1)))
        elif distance <= place < 2 * distance:
            source = (rank - distance) % ranks
            rounds.append(MessageRound(source=source, received=(0, 1)))
        else:
            rounds.append(MessageRound())
    return tuple(rounds)


def collect_rounds(rank: int, ranks: int, root: int) -> tuple[MessageRound, ...]:
    """One rank gets a row of each one, along a binomial tree.

    Row i of a rank's buffer is that of the rank i places after it, as in `gather_rounds`. A rank
    other than the root sends all that it has, once.
    """
    place, rounds = (rank - root) % ranks, list[MessageRound]()
    for distance in _distances(ranks):
        held = place % (2 * distance)
        if held == distance:
            to = (rank - distance) % ranks
            rounds.append(MessageRound(to=to, sent=(0, min(distance, ranks - place))))
        elif held == 0 and place + distance < ranks:
            last = min(2 * distance, ranks - place)
            source = (rank + distance) % ranks
            rounds.append(MessageRound(source=source, received=(distance, last)))
        else:
            rounds.append(MessageRound())
    return tuple(rounds)


def _distances(ranks: int) -> list[int]:
    return [1 << k for k in range(count_rounds(ranks))]
