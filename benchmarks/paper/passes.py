"""What a pass of requests that were sent at once says: times, rates, how many ran together, and what the prefix tree had of them."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from contextlib import suppress

from benchmarks.report import summary
from benchmarks.servers import Stream
from benchmarks.tpot import SETTLE_TOKENS, time_per_token

SPREAD = ("tpot_s", "ttft_s", "tokens_per_s", "decoding_tokens_per_s")  # figures whose smallest and largest are kept


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


def figures_of(streams: list[Stream]) -> dict:
    """Times and rates of a pass, in seconds and output tokens per second; ``window_requests`` are those that the TPOT is of.

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
        "ttft_s": summary(stream.ttft for stream in streams),
    }


def medians_of(passes: Sequence[list[Stream]], firsts: Sequence[Sequence[float]] = ()) -> dict:
    """Figures of prompts that were sent several times: of each figure of a pass the median. ``passes`` has them pass by pass, and ``spread``
    the smallest and the largest of those in ``SPREAD``.

    The time to the first token is the median over passes of the median over a pass's requests; least, most and number are of all requests.

    Args:
        firsts: times to the first token of the requests of further passes, in seconds.

    Raises:
        ValueError: as :func:`figures_of`.
    """
    each = [figures_of(streams) for streams in passes]
    listed = {name: [figures[name] for figures in each] for name in each[0] if name != "ttft_s"}
    counts = {name for name, values in listed.items() if isinstance(values[0], int)}
    medians = {name: (statistics.median_low if name in counts else statistics.median)(values) for name, values in listed.items()}
    late = [*firsts, *([stream.ttft for stream in streams] for streams in passes)]
    listed["ttft_s"] = [statistics.median(times) for times in late]
    ttft = summary(time for times in late for time in times) | {"median": statistics.median(listed["ttft_s"])}
    spread = {name: [min(listed[name]), max(listed[name])] for name in SPREAD}
    return medians | {"ttft_s": ttft, "passes": each, "spread": spread}


def prefix_of(streams: list[Stream], page_size: int) -> str:
    """``hit`` if each prompt was in the tree, but for a page; ``cold`` if none was, in part or in full; else ``part``."""
    cached = [stream.meta["cached_tokens"] for stream in streams]
    if not any(cached):
        return "cold"
    return "hit" if all(stream.meta["prompt_tokens"] - found <= page_size for stream, found in zip(streams, cached)) else "part"
