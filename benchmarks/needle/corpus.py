"""What prompts are made of: the tokenizer, the prose of the haystack, the words of the needles."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

HERE = Path(__file__).resolve().parent
BOS, EOS, USER, ASSISTANT = range(4)
Tokens = tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Corpus:
    """The tokenizer, the prose and the words that prompts are made of.

    Words, numbers and phrases are encoded once and then joined as tokens: the tokenizer splits
    before every leading space, digit and punctuation mark, so the joined text has the same tokens.

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
    _phrases: dict[str, Tokens] = field(default_factory=dict, repr=False)

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

    def phrase(self, text: str) -> Tokens:
        """The tokens of a text that recurs."""
        if text not in self._phrases:
            self._phrases[text] = tuple(self.encode(text))
        return self._phrases[text]

    @functools.cached_property
    def word_tokens(self) -> tuple[Tokens, ...]:
        return tuple(tuple(self.encode(word)) for word in self.words)

    @functools.cached_property
    def short_words(self) -> tuple[Tokens, ...]:
        """The words of a single token."""
        return tuple(tokens for tokens in self.word_tokens if len(tokens) == 1)

    @functools.cached_property
    def three_digits(self) -> tuple[int, ...]:
        """The token of 000, 001, ..."""
        return tuple(self.phrase(f"{number:03d}")[0] for number in range(1000))

    def number(self, value: int) -> Tokens:
        """A number of six digits with its leading space."""
        return self.phrase(" ") + (self.three_digits[value // 1000], self.three_digits[value % 1000])

    def prose(self, rng: np.random.Generator, length: int) -> tuple[list[int], np.ndarray]:
        """Consecutive sentences from a random start; the last is cut so that the total is exact.

        Returns:
            ``[length]`` token ids, and where each sentence ends in them.
        """
        first = int(rng.integers(len(self.sentence_starts) - 1))
        if length <= 0:
            return [], np.zeros(1, np.int64)
        start = int(self.sentence_starts[first])
        laps = 1 + (start + length) // len(self.sentence_tokens)
        ends = np.concatenate([self.sentence_starts[1:].astype(np.int64) + lap * len(self.sentence_tokens) for lap in range(laps)])
        ends = ends[first : int(np.searchsorted(ends, start + length)) + 1] - start
        tokens = np.take(self.sentence_tokens, np.arange(start, start + int(ends[-1])), mode="wrap").tolist()
        last = int(ends[-2]) if len(ends) > 1 else 0
        ends[-1] = length
        return tokens[:last] + self._cut(tokens[last:], length - last), ends

    def _cut(self, sentence: list[int], length: int) -> list[int]:
        """Cuts between words, so that text and tokens agree, and fills up with one-token words."""
        if len(sentence) <= length:
            return sentence
        whole = length
        while not self.tokenizer.id_to_token(sentence[whole]).startswith("Ġ"):
            whole -= 1
        return sentence[:whole] + list(self.phrase(" and")) * (length - whole)


@functools.cache
def default_corpus() -> Corpus:
    """The corpus beside this file."""
    return Corpus.load(HERE / "model", HERE / "data")
