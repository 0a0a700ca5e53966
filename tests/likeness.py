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
    """Tokens are the oracle's. The first that is not may be its second choice alone, where that is next to as likely as the first: KV that is
    rounded otherwise may prefer it. What follows it is another text, and is not compared.

    Args:
        tie: most between the logits of two such tokens.
        least: share of all tokens that are to be the oracle's at least.
    """
    same = 0
    for tokens, result in zip(found, results, strict=True):
        assert len(tokens) == len(result.tokens)
        end = next((at for at, pair in enumerate(zip(tokens, result.tokens)) if pair[0] != pair[1]), len(tokens))
        if end < len(tokens):
            told = f"token {end}: {tokens[end]}, expected {result.tokens[end]}, by {result.margin[end]:.4f}"
            assert result.margin[end] < tie and tokens[end] == int(result.logits[end].topk(2).indices[1]), told
        same += end
    assert same >= least * sum(map(len, found))
