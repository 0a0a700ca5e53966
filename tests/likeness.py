"""How alike two servers' answers are, or a server's and the oracle's."""

from __future__ import annotations

from oracle import OracleResult


def alike(one: list[list[int]], other: list[list[int]]) -> float:
    """Share of tokens before the first one that differs, of pairs of answers that are equally long."""
    same = [
        next((at for at, (a, b) in enumerate(zip(*pair, strict=True)) if a != b), len(pair[0])) for pair in zip(one, other, strict=True)
    ]
    return sum(same) / sum(map(len, one))


def assert_same_but_for_ties(found: list[list[int]], results: list[OracleResult], tie: float, least: float) -> None:
    """Tokens are the oracle's, up to one that is next to as likely as another: where KV is rounded otherwise, that one may be preferred.

    Args:
        tie: most between the logits of two such tokens.
        least: share of all tokens that are to be compared at least.
    """
    ends = [next((at for at, margin in enumerate(result.margin) if margin < tie), len(result.tokens)) for result in results]
    assert [tokens[:end] for tokens, end in zip(found, ends, strict=True)] == [result.tokens[:end] for result, end in zip(results, ends)]
    assert list(map(len, found)) == [len(result.tokens) for result in results]
    assert sum(ends) >= least * sum(map(len, found)), ends
