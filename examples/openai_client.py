# SPDX-License-Identifier: Apache-2.0
"""Asks two questions about one long document through the OpenAI API. The second finds the document in the prefix cache.

Run: python -m benchmarks.needle.weights
     python -m sglang.launch_server --kv-retrieval freekv --model-path benchmarks/needle/model --freekv-budget 512
     python -m examples.openai_client [--url http://127.0.0.1:30000]
Expect: two right answers. The first token of the second answer comes sooner.
"""

import argparse
import time

from openai import OpenAI

from examples.documents import describe, judge, question_about, write_document


def ask(client: OpenAI, model: str, message: dict) -> tuple[str, float, dict]:
    """The answer, the seconds until its first token, and SGLang's ``meta_info``."""
    started, first, words, meta = time.perf_counter(), None, [], {}
    stream = client.chat.completions.create(
        model=model, messages=[message], temperature=0, max_tokens=64, stream=True, extra_body={"return_meta_info": True}
    )
    for chunk in stream:
        for choice in chunk.choices:
            if choice.delta.content:
                first = first or time.perf_counter() - started
                words.append(choice.delta.content)
            meta = getattr(choice, "meta_info", None) or meta
    return "".join(words), first, meta


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:30000")
    parser.add_argument("--tokens", type=int, default=6000, help="length of the document")
    parser.add_argument("--seed", type=int, default=0, help="another seed writes another document, which is in no cache")
    arguments = parser.parse_args()

    client = OpenAI(base_url=f"{arguments.url}/v1", api_key="none")
    model = client.models.list().data[0].id
    document, facts = write_document(arguments.seed, arguments.tokens, questions=2)
    for fact in facts:
        answer, first, meta = ask(client, model, question_about(document.text, fact.question))
        print(f"\n{fact.question}\n  {judge(answer, fact)}")
        print(f"  prompt {meta['prompt_tokens']} tokens, cached {meta['cached_tokens']}, first token after {first:.3f} s")
        print(f"  {describe(meta['freekv'])}")


if __name__ == "__main__":
    main()
