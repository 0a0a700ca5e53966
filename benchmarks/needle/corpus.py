"""What prompts are made of: the tokenizer, the prose of the haystack, the words of the needles."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

HERE = Path(__file__).resolve().parent
BOS, EOS, USER, ASSISTANT = range(4)


@dataclass(frozen=True, eq=False)
class Corpus:
    """The tokenizer, the prose and the words that prompts are made of.

    Args:
        tokenizer: the model's tokenizer.
        sentence_tokens: ``[tokens] int32`` every sentence with its leading space, end to end.
        sentence_starts: ``[sentences + 1] int32`` where each sentence starts.
        words: words with their leading space.
    """

    tokenizer: Tokenizer
    sentence_tokens: np.ndarray
    sentence_starts: np.ndarray
    words: tuple[str, ...]

    @classmethod
    def load(cls, model_directory: Path, data_directory: Path) -> "Corpus":
        return cls(
            tokenizer=Tokenizer.from_file(str(model_directory / "tokenizer.json")),
            sentence_tokens=np.load(data_directory / "sentence_tokens.npy").astype(np.int32),
            sentence_starts=np.load(data_directory / "sentence_starts.npy"),
            words=tuple(" " + word for word in (data_directory / "words.txt").read_text().split()),
        )

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text).ids

    def decode(self, token_ids: Sequence[int]) -> str:
        return self.tokenizer.decode(list(token_ids), skip_special_tokens=False)

    def prose(self, rng: np.random.Generator, length: int) -> list[list[int]]:
        """Consecutive sentences from a random start; the last is cut so that the total is exact."""
        sentences, index = [], int(rng.integers(len(self.sentence_starts) - 1))
        while length > 0:
            start, end = self.sentence_starts[index : index + 2]
            sentences.append(self._cut(self.sentence_tokens[start:end].tolist(), length))
            length -= len(sentences[-1])
            index = (index + 1) % (len(self.sentence_starts) - 1)
        return sentences

    def _cut(self, sentence: list[int], length: int) -> list[int]:
        """Cuts between words, so that text and tokens agree, and fills up with one-token words."""
        if len(sentence) <= length:
            return sentence
        whole = length
        while not self.tokenizer.id_to_token(sentence[whole]).startswith("Ġ"):
            whole -= 1
        return sentence[:whole] + self.encode(" and") * (length - whole)


@functools.cache
def default_corpus() -> Corpus:
    """The corpus beside this file."""
    return Corpus.load(HERE / "model", HERE / "data")
