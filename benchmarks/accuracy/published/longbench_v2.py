"""LongBench v2 for SGLang's evaluator, which leaves out prompts that are too long: here they are cut in the middle, as is published.

Its metrics are by difficulty, so a row's difficulty becomes ``easy-short``; the scores by length come of these.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

LEADING, TRAILING = 24, 96  # tokens of the template, and of a chat template, before the context and after it, at most


def cut(context: str, before: int, after: int, tokenizer) -> str:
    """A context without its middle, of at most ``before`` and ``after`` tokens; whole if it has no more."""
    token_ids = tokenizer.encode(context, add_special_tokens=False)
    if len(token_ids) <= before + after:
        return context
    return tokenizer.decode(token_ids[:before]) + tokenizer.decode(token_ids[len(token_ids) - after :])


def write(rows: list[dict], path: Path, tokenizer, max_input: int) -> None:
    """The file for ``--dataset-path``: the first and the last half of ``max_input`` tokens of every prompt."""
    with path.open("w", encoding="utf-8") as file:
        for row in rows:
            asked = "\n".join(row[name] for name in ("question", "choice_A", "choice_B", "choice_C", "choice_D"))
            after = max_input // 2 - TRAILING - len(tokenizer.encode(asked, add_special_tokens=False))
            context = cut(row["context"].strip(), max_input // 2 - LEADING, max(0, after), tokenizer)
            difficulty = f"{row['difficulty']}-{row['length']}"
            file.write(json.dumps(row | {"context": context, "difficulty": difficulty}, ensure_ascii=False) + "\n")


def scores(metrics: dict, path: Path) -> dict[str, float]:
    """Percent of right answers, overall, by length and by difficulty, from the evaluator's metrics of the file.

    Raises:
        RuntimeError: the metrics are not of all of its rows.
    """
    counts = Counter(json.loads(line)["difficulty"] for line in path.read_text(encoding="utf-8").splitlines())
    means = {group: metrics.get(f"difficulty_{group}") for group in counts}

    def percent(groups: list[str]) -> float:
        return 100 * sum(means[group] * counts[group] for group in groups) / sum(counts[group] for group in groups)

    if missing := [group for group, mean in means.items() if mean is None]:
        raise RuntimeError(f"expected scores of {sorted(counts)}, there are none of {missing}")
    if abs(percent(list(counts)) - 100 * metrics["score"]) > 1e-6:
        raise RuntimeError(f"score: expected {percent(list(counts)) / 100}, by the groups; got {metrics['score']}: rows were left out")
    names = dict.fromkeys(name for group in counts for name in group.split("-"))
    return {"overall": percent(list(counts))} | {name: percent([group for group in counts if name in group.split("-")]) for name in names}
