"""Which load of agents is still answered in time."""

from __future__ import annotations

from pathlib import Path

from benchmarks.paper import agents, ladder, plots
from benchmarks.report import markdown

from .goodput import cut_short
from .names import BACKENDS, SYSTEMS
from .section import Section

KINDS = {name: (SYSTEMS["stock"], BACKENDS[backend]) for name, backend in zip(agents.FASTER, agents.BACKENDS)}
KINDS |= {agents.HICACHE: (SYSTEMS["stock"], "HiCache"), agents.FREEKV: (SYSTEMS["freekv"], "")}
NAMES = {name: f"{system} with {what}" if what else system for name, (system, what) in KINDS.items()}
HEADER = ("agents", "goodput", "within limits", "turns / s", "TTFT, ms", "p99", "TPOT, ms", "p99", "tokens/s", "hit rate", "context")


def of_agents(path: Path, directory: Path) -> Section:
    section = Section.of("Conversations of agents", path, directory)
    section.figure += f", on {section.devices(section.results.values())}"
    first = next(iter(section.results.values()))
    limits, order = ladder.Limits(**first["limits"]), (agents.SYSTEMS, "agents")
    rows = ladder.rows_of(section.results, limits, *order)
    best = ladder.best_of(section.results, limits, *order)
    section.facts |= {"agents": best}
    section.add(
        _told(first, limits) + _replayed(section),
        markdown(
            ("system", *HEADER),
            [
                (NAMES[system], level, *point, *(result[name] for name in (*agents.COLUMNS, "median_context")))
                for system, level, point, result in rows
            ],
        ),
        "*Turns / s* are all that were sent. *Context* is the median prompt, in tokens." + cut_short(rows, best, NAMES),
        markdown(("system", "best goodput"), [(NAMES[system], found) for system, found in best.items()]),
    )
    lines = {KINDS[each]: [(level, point.goodput) for name, level, point, _ in rows if name == each] for each in best}
    title = f"{section.shape}: turns per second within limits"
    section.picture("levels", plots.curves, title, "agents at once", "within limits", lines, SYSTEMS["freekv"], doubling=True)
    return section


def _told(result: dict, limits: ladder.Limits) -> str:
    talk = result["talk"]
    return (
        f"An agent sends its whole history and is answered with {talk['answer']} tokens. It waits {talk['think_s']:g} s for a tool in the "
        f"mean, appends {talk['observation']:,} tokens in the mean, and sends the next turn. A conversation has {talk['turns']} turns. It "
        f"begins with {talk['tools']:,} tokens that all agents share and {talk['task']:,} of its own. Then the agent begins another one. "
        f"A turn is within limits if its first token comes within {limits.ttft_s:g} s and the others follow "
        f"at most {limits.tpot_s * 1e3:g} ms apart in the mean. Goodput is such turns per second, of those sent within {result['seconds']:g} s. "
        "The levels of a system end where its goodput and the share of such turns fall. They end, too, where that share is below "
        f"{ladder.ENOUGH:.0%} for the second time. No level was repeated."
    )


def _replayed(section: Section) -> str:
    loads = sorted({f"`{result['load']}`" for result in section.results.values() if "load" in result})
    return f" FreeKV has the server's default preset and replays the load {', '.join(loads)}." if loads else ""
