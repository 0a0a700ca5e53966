"""Plain generations that run while something else is sent, and whose tokens must not change by it."""

from __future__ import annotations

import threading

from serving import TestServer

PROMPTS = ([*range(100, 190)], [7] * 100, [*range(3000, 3150)])  # with their answers they fit the budget: attention is exact
TOKENS = 40


class Beside:
    """``with Beside(server):`` greedy generations run one after another in as many threads as there are prompts.

    On leaving, each has ended at least once inside, and all had the tokens that they have on an idle server.
    """

    def __init__(self, server: TestServer) -> None:
        self.server = server
        self.known = [server.generate(prompt, TOKENS)["output_ids"] for prompt in PROMPTS]
        self.wrong: list = []
        self.running = threading.Event()

    def __enter__(self) -> Beside:
        self.running.set()
        self.threads = [threading.Thread(target=self._generate, args=(index,)) for index in range(len(PROMPTS))]
        for thread in self.threads:
            thread.start()
        return self

    def _generate(self, index: int) -> None:
        while not self.wrong:
            try:
                tokens = self.server.generate(PROMPTS[index], TOKENS)["output_ids"]
            except Exception as error:
                self.wrong.append(error)
                return
            if tokens != self.known[index]:
                self.wrong.append((index, tokens, self.known[index]))
            if not self.running.is_set():
                return

    def __exit__(self, kind, *_) -> None:
        self.running.clear()
        for thread in self.threads:
            thread.join()
        if kind is None:
            assert not self.wrong, f"{self.wrong[0]}\n{self.server.tail()}"
