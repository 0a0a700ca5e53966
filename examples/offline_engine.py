# SPDX-License-Identifier: Apache-2.0
"""Asks about several long documents in one program, without a server.

Run: python -m examples.offline_engine [--model-path MODEL] [--budget TOKENS] [--host-memory GIB]
Expect: right answers, and fewer pages attended to than each document has.
"""

import argparse

import sglang as sgl
from transformers import AutoTokenizer

from benchmarks.needle.weights import ready
from examples.documents import describe, judge, question_about, write_document


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model-path", help="default: the bundled needle model")
    parser.add_argument("--budget", type=int, default=512, help="tokens that a decode step reads per request and kv head")
    parser.add_argument("--host-memory", type=float, help="GiB for the KV cache (default: a share of what the machine has)")
    parser.add_argument("--documents", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=3000, help="length of each document")
    arguments = parser.parse_args()

    written = [write_document(seed, arguments.tokens, questions=1) for seed in range(arguments.documents)]
    model = arguments.model_path or str(ready())
    tokenizer = AutoTokenizer.from_pretrained(model)
    prompts = [
        tokenizer.apply_chat_template([question_about(document.text, fact.question)], add_generation_prompt=True, return_dict=False)
        for document, (fact,) in written
    ]

    engine = sgl.Engine(
        model_path=model,
        kv_retrieval="freekv",
        freekv_budget=arguments.budget,
        freekv_host_memory=arguments.host_memory,
        max_running_requests=arguments.documents,
    )
    answers = engine.generate(input_ids=prompts, sampling_params={"temperature": 0, "max_new_tokens": 64})
    engine.shutdown()

    for (_, (fact,)), answer in zip(written, answers):
        print(f"\n{fact.question}\n  {judge(answer['text'], fact)}")
        print(f"  prompt {answer['meta_info']['prompt_tokens']} tokens")
        print(f"  {describe(answer['meta_info']['freekv'])}")


if __name__ == "__main__":  # needed, because the engine starts processes that import this file
    main()
