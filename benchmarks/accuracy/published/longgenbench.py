"""LongGenBench against a server: texts of many entries, how many of these are there, and whether those with an event mention it.

    python -m benchmarks.accuracy.published.longgenbench --url http://127.0.0.1:30000 --model MODEL --data Dataset_short.json --out DIR

Completion is counted; what an entry mentions is asked of a judge, a model behind any OpenAI API. Texts are kept in DIR/texts.jsonl as they
come: what is there is not asked for again, so that an interrupted run goes on, and one without a judge is judged later.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import zlib
from pathlib import Path

from benchmarks.accuracy.published import program
from benchmarks.accuracy.published.endpoint import Endpoint, text_of
from benchmarks.accuracy.published.records import CHECKS, Plan, RecordError, read

SEPARATOR, FINISHED = "#*#", "*** finished"
QUESTION = "{examples}Text: {entry}\n\nDoes this text include the following: {event}? Answer with 'yes' or 'no' only."
JUDGE_TOKENS = 50
Check = tuple[int, str, int]  # plan, one of CHECKS, entry


def entries_of(plan: Plan, text: str) -> dict[int, str]:
    """The entries of a text by their numbers; of several with the same number, the first."""
    entries: dict[int, str] = {}
    for entry in (plan.prefix + text).split(SEPARATOR):
        if found := re.search(rf"{re.escape(plan.kind)} (\d+)", entry):
            entries.setdefault(int(found[1]), entry)
    return entries


def completion(plan: Plan, entries: dict[int, str]) -> float:
    """Percent of the entries asked for that are there."""
    return 100 * len(entries.keys() & set(range(1, plan.number + 1))) / plan.number


def checks_of(plans: list[Plan], texts: list[dict[int, str]]) -> dict[Check, str]:
    """The event that each entry which is there has to mention."""
    return {
        (number, name, entry): event
        for number, (plan, entries) in enumerate(zip(plans, texts))
        for name in CHECKS
        for entry, event in plan.checks[name].items()
        if entry in entries
    }


def scores(plans: list[Plan], texts: list[dict[int, str]], verdicts: dict[Check, bool] | None) -> dict[str, float | int]:
    """Completion, and if there are verdicts, accuracy: of each kind of check, their mean, and that of all that was asked for.

    ``stic_1`` and ``stic_2`` count all checks alike, of the entries that are there and of all entries.
    """
    completed = sum(map(completion, plans, texts)) / len(plans)
    result: dict[str, float | int] = {"texts": len(plans), "completion_rate": completed}
    if verdicts is None:
        return result
    by_kind = {name: [right for check, right in verdicts.items() if check[1] == name] for name in CHECKS}
    means = {name: 100 * sum(each) / len(each) if each else 0.0 for name, each in by_kind.items()}
    accuracy = sum(means.values()) / len(means)
    asked = sum(len(plan.checks[name]) for plan in plans for name in CHECKS)
    result |= {f"accuracy_{name}": mean for name, mean in means.items()}
    result |= {"accuracy": accuracy, "overall": completed * accuracy / 100, "checks": asked}
    right = 100 * sum(verdicts.values())
    return result | {"stic_1": right / len(verdicts) if verdicts else 0.0, "stic_2": right / asked if asked else 0.0}


def generate(endpoint: Endpoint, plans: list[Plan], path: Path, options: argparse.Namespace) -> list[dict]:
    """The text for each plan, from the file or the server, which goes into the file."""
    texts = _kept(plans, path)
    missing = [number for number in range(len(plans)) if number not in texts]
    drawn = {"max_tokens": options.max_tokens, "temperature": options.temperature, "top_p": options.top_p, "stop": [FINISHED]}
    bodies = [{"model": options.model, "messages": [{"role": "user", "content": plans[number].prompt}]} | drawn for number in missing]
    print(f"{len(texts)} of {len(plans)} texts are in {path}, {len(bodies)} to be generated", flush=True)
    with path.open("a", encoding="utf-8") as file:

        def keep(position: int, reply: dict) -> None:
            number, choice = missing[position], reply["choices"][0]
            tokens = (reply.get("usage") or {}).get("completion_tokens")
            text = {"number": number, "prompt": _digest(plans[number]), "text": text_of(reply)}
            texts[number] = text = text | {"ended": choice.get("finish_reason"), "tokens": tokens}
            file.write(json.dumps(text, ensure_ascii=False) + "\n")
            file.flush()
            print(f"text {number}: {tokens} tokens, {text['ended']}", flush=True)

        endpoint.send_all("/v1/chat/completions", bodies, options.concurrency, keep)
    return [texts[number] for number in range(len(plans))]


def _digest(plan: Plan) -> int:
    return zlib.crc32(plan.prompt.encode())


def _kept(plans: list[Plan], path: Path) -> dict[int, dict]:
    if not path.exists():
        return {}
    kept = {}
    for line, text in enumerate(map(json.loads, path.read_text(encoding="utf-8").splitlines()), 1):
        if text["number"] >= len(plans):
            continue
        if text["prompt"] != (expected := _digest(plans[text["number"]])):
            wrong = f"expected a text for prompt {expected}, got one for {text['prompt']}"
            raise RecordError(f"{path}, line {line}: {wrong}; name another --out")
        kept[text["number"]] = text
    return kept


def judge(options: argparse.Namespace, texts: list[dict[int, str]], checks: dict[Check, str]) -> dict[Check, bool]:
    """Whether the judge says that each entry mentions its event; greedy, and without thinking where it can be told so."""
    examples = f"{options.judge_examples.read_text(encoding='utf-8').strip()}\n\n" if options.judge_examples else ""
    order, verdicts = list(checks), {}
    common = {"model": options.judge_model, "temperature": 0, "max_tokens": JUDGE_TOKENS}
    if "qwen3" in options.judge_model.lower():
        common["chat_template_kwargs"] = {"enable_thinking": False}
    asked = [QUESTION.format(examples=examples, entry=texts[check[0]][check[2]].strip(), event=checks[check]) for check in order]
    bodies = [common | {"messages": [{"role": "user", "content": question}]} for question in asked]

    def keep(position: int, reply: dict) -> None:
        verdicts[order[position]] = "yes" in text_of(reply).lower()

    print(f"{len(bodies)} questions to the judge", flush=True)
    endpoint = Endpoint(options.judge_url, key=os.environ.get("OPENAI_API_KEY"))
    endpoint.send_all("/v1/chat/completions", bodies, options.concurrency, keep)
    return verdicts


def run(options: argparse.Namespace) -> dict:
    plans = read("longgenbench", options.data, None, options.limit)
    options.out.mkdir(parents=True, exist_ok=True)
    texts = generate(Endpoint(options.url), plans, options.texts or options.out / "texts.jsonl", options)
    entries, verdicts = [entries_of(plan, text["text"]) for plan, text in zip(plans, texts)], None
    if options.judge_url:
        verdicts = judge(options, entries, checks_of(plans, entries))
    else:
        print("accuracy: expected a judge, there is none; use --judge-url, the texts are kept", flush=True)
    unfinished = sum(text["ended"] == "length" for text in texts)
    return scores(plans, entries, verdicts) | {"unfinished": unfinished, "judge": options.judge_model if options.judge_url else None}


def main(arguments: list[str] | None = None) -> int:
    parser = program.parser(__doc__, "Dataset_short.json or Dataset_long.json", "directory of result.json and texts.jsonl")
    parser.add_argument("--texts", type=Path, help="the texts, if elsewhere")
    parser.add_argument("--max-tokens", type=int, default=16000)
    parser.add_argument("--temperature", type=float, default=0.95)
    parser.add_argument("--top-p", type=float, default=0.95)
    parser.add_argument("--judge-url", help="of the judge; without one accuracy is not scored")
    parser.add_argument("--judge-model", default="Qwen/Qwen3-32B", help="its name for that")
    parser.add_argument("--judge-examples", type=Path, help="a text to go before every question, such as the published examples")
    return program.finish(run, parser.parse_args(arguments))


if __name__ == "__main__":
    sys.exit(main())
