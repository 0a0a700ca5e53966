# SPDX-License-Identifier: Apache-2.0
"""Plays an agent whose conversation grows by one tool result a turn. Each turn computes only its new tokens.

Run: python -m benchmarks.needle.weights
     python -m sglang.launch_server --kv-retrieval freekv --model-path benchmarks/needle/model --freekv-budget 512
     python -m examples.agent [--url http://127.0.0.1:30000]
Expect: right answers. The prompt grows, but the number of computed tokens stays about the same.
"""

import argparse

from openai import OpenAI

from examples.documents import describe, judge, question_about, write_document


def read_file(number: int, tokens: int, seed: int):
    """Stands for the agent's tool. Returns the text of a file, and a fact in it to ask about."""
    document, (fact,) = write_document(1000 * seed + number, tokens, questions=1)
    return document.text, fact


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:30000")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=900, help="length of each tool result")
    parser.add_argument("--seed", type=int, default=1, help="another seed gives a conversation that is in no cache")
    arguments = parser.parse_args()

    client = OpenAI(base_url=f"{arguments.url}/v1", api_key="none")
    model = client.models.list().data[0].id
    conversation = []
    for turn in range(1, arguments.turns + 1):
        text, fact = read_file(turn, arguments.tokens, arguments.seed)
        conversation.append(question_about(text, fact.question))
        reply = client.chat.completions.create(
            model=model, messages=conversation, temperature=0, max_tokens=64, extra_body={"return_meta_info": True}
        )
        choice = reply.choices[0]
        conversation.append({"role": "assistant", "content": choice.message.content})

        meta = choice.meta_info
        prompt, cached = meta["prompt_tokens"], meta["cached_tokens"]
        print(f"turn {turn}: {judge(choice.message.content, fact)}")
        print(f"  prompt {prompt} tokens, cached {cached}, computed {prompt - cached}")
        print(f"  {describe(meta['freekv'])}")


if __name__ == "__main__":
    main()
