# SPDX-License-Identifier: Apache-2.0
"""Forks an SGLang program over one shared document. All questions run at once, and the document is computed once.

Run: python -m benchmarks.needle.weights
     python -m sglang.launch_server --kv-retrieval freekv --model-path benchmarks/needle/model --freekv-budget 512
     python -m examples.frontend_fork [--url http://127.0.0.1:30000]
Expect: a right answer from every branch. Each finds the document in the prefix cache.
"""

import argparse

import sglang as sgl
from transformers import AutoTokenizer

from examples.documents import describe, judge, question_about, write_document


@sgl.function
def ask_all(s, shared: str, branches: list[str]):
    s += shared
    s.sync()  # hands the document to the fork, which has it computed before the branches ask
    forks = s.fork(len(branches))
    for fork, branch in zip(forks, branches):
        fork += branch
        fork += sgl.gen("answer", max_tokens=64, temperature=0)
    forks.join()
    s["answers"] = [fork["answer"] for fork in forks]
    s["meta"] = [fork.get_meta_info("answer") for fork in forks]


def chat_around(model_path: str, document: str) -> tuple[str, str]:
    """The prompt's text before and after a question about the document, by the model's chat template.

    It lacks the BOS token, which the server adds.
    """
    tokenizer, mark = AutoTokenizer.from_pretrained(model_path), "<question>"
    text = tokenizer.apply_chat_template([question_about(document, mark)], add_generation_prompt=True, tokenize=False)
    before, behind = text.split(mark)
    return before.removeprefix(tokenizer.bos_token or ""), behind


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:30000")
    parser.add_argument("--questions", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=3000, help="length of the document")
    arguments = parser.parse_args()

    server = sgl.RuntimeEndpoint(arguments.url)
    document, facts = write_document(2, arguments.tokens, arguments.questions)
    before, behind = chat_around(server.model_info["model_path"], document.text)
    state = ask_all.run(before, [fact.question + behind for fact in facts], backend=server)
    for fact, answer, meta in zip(facts, state["answers"], state["meta"]):
        print(f"\n{fact.question}\n  {judge(answer, fact)}")
        print(f"  prompt {meta['prompt_tokens']} tokens, cached {meta['cached_tokens']}")
        print(f"  {describe(meta['freekv'])}")


if __name__ == "__main__":
    main()
