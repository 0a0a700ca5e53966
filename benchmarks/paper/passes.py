"""What a pass of requests that were sent at once says: times, rates, how many ran together, and what the prefix tree had of them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from benchmarks.report import summary
from benchmarks.servers import Stream
from benchmarks.tpot import SETTLE_TOKENS, time_per_token


def together(streams: list[Stream]) -> list[list[Stream]]:
    """Who decoded together: the most first, and of as many those who did for longest. A request that was retracted counts on."""
    begins = [next(time for time, count in stream.arrivals if count > SETTLE_TOKENS) for stream in streams]
    spans = [(begin, stream.arrivals[-1][0]) for begin, stream in zip(begins, streams)]
    edges = sorted({edge for span in spans for edge in span})
    slices = [
        ([stream for (begin, end), stream in zip(spans, streams) if begin <= start and stop <= end], stop - start)
        for start, stop in zip(edges, edges[1:])
    ]
    return [group for group, _ in sorted(slices, key=lambda item: (len(item[0]), item[1]), reverse=True) if group]


def figures_of(streams: list[Stream], firsts: Sequence[float] = ()) -> dict:
    """Times and rates of a pass, in seconds and output tokens per second; ``window_requests`` are those that the TPOT is of.

    ``firsts`` are times to the first token of other passes over the same prompts.

    Raises:
        ValueError: no window is long enough for a time per token.
    """
    groups = together(streams)
    for group in groups:
        with suppress(ValueError):  # a window too short to tell; others decoded together for longer
            decoding = time_per_token(group)
            break
    else:
        raise ValueError(f"{len(streams)} requests decoded for no time to speak of; ask for more tokens")
    seconds = max(stream.arrivals[-1][0] for stream in streams) - min(stream.started for stream in streams)
    return decoding | {
        "window_requests": len(group),
        "at_once": len(groups[0]),
        "decoding_tokens_per_s": len(group) / decoding["tpot_s"],
        "tokens_per_s": sum(stream.arrivals[-1][1] for stream in streams) / seconds,
        "seconds": seconds,
        "ttft_s": summary((*firsts, *(stream.ttft for stream in streams))),
    }


def prefix_of(streams: list[Stream], page_size: int) -> str:
    """``hit`` if each prompt was in the tree, but for a page; ``cold`` if none was, in part or in full; else ``part``."""
    cached = [stream.meta["cached_tokens"] for stream in streams]
    if not any(cached):
        return "cold"
    return "hit" if all(stream.meta["prompt_tokens"] - found <= page_size for stream, found in zip(streams, cached)) else "part"
