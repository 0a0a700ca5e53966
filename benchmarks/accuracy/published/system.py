"""The system behind an endpoint: what it was started with, and what its retrieval does."""

from __future__ import annotations

from benchmarks.accuracy.published.evaluators import EvaluatorFailed
from benchmarks.accuracy.published.presets import PAPER_PAGE, PAPER_POOLING, Preset

FACTS = ("model_path", "version", "attention_backend", "page_size", "context_length", "max_total_num_tokens", "freekv")
POOLINGS = {"freekv": PAPER_POOLING, "quest": "max", "arkvale": "mean"}  # usual ones


def facts_of(info: dict) -> dict:
    """What of /server_info the results depend on."""
    return {name: info.get(name) for name in FACTS}


def name_of(info: dict) -> str:
    """Of the system in the results; page size and pooling are told where they are not the usual ones."""
    built = info.get("freekv")
    if built is None:
        return "stock"
    settings = [built[name] for name in ("method", "budget_tokens", "sink_tokens", "window_tokens", "tau", "digest")]
    if built.get("pooling", usual := POOLINGS[built["method"]]) != usual:  # servers before f0f8eeb do not tell it
        settings.append(built["pooling"])
    if built["page_size"] != PAPER_PAGE:
        settings.append(f"page-{built['page_size']}")
    return "-".join(format(setting, "g") if isinstance(setting, float) else str(setting) for setting in settings if setting is not None)


def totals_of(info: dict) -> dict[str, int] | None:
    """What retrieval has done so far, over all schedulers; None of a stock server."""
    all_totals = [state["freekv"]["totals"] for state in info["internal_states"] if "freekv" in state]
    return {name: sum(totals[name] for totals in all_totals) for name in all_totals[0]} if all_totals else None


def done_between(before: dict[str, int] | None, after: dict[str, int] | None) -> dict[str, int] | None:
    """What retrieval did; None of a stock server.

    Raises:
        EvaluatorFailed: the server is another one than before.
    """
    if before is None and after is None:
        return None
    if before is None or after is None or any(after[name] < before[name] for name in before):
        raise EvaluatorFailed(f"the server was started anew meanwhile: its totals were {before}, now they are {after}")
    return {name: after[name] - before[name] for name in before}


def warnings_of(preset: Preset, info: dict) -> list[str]:
    """What makes the scores something else than the preset says."""
    if info.get("freekv") is None:
        warnings = ["no freekv block in /server_info: this measures dense attention; for retrieval start the server as above"]
    else:
        warnings = preset.differences(info["freekv"])
    if info.get("enable_deterministic_inference") and preset.sampling and preset.sampling.samples > 1:
        warnings.append("--enable-deterministic-inference: lm-eval sends one seed, so a question's samples are all the same; leave it out")
    return warnings
