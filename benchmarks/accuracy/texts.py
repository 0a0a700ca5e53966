"""Long real texts that come with every CPython: pieces of the language reference, and modules of the library, in turns."""

from __future__ import annotations

import hashlib
import pydoc_data.topics
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path

from transformers import PreTrainedTokenizerBase

PIECE = 38_000  # characters: at least 8,200 tokens of a vocabulary of 49,152
MODULES = ("argparse", "inspect", "typing", "tarfile", "doctest", "subprocess", "difflib", "mailbox", "ipaddress", "pickle", "statistics")


@dataclass(frozen=True)
class Document:
    """One text; its name has the beginning of its checksum, because releases of Python differ."""

    title: str
    text: str

    @cached_property
    def name(self) -> str:
        return f"{self.title}@{hashlib.sha256(self.text.encode()).hexdigest()[:8]}"

    def token_ids(self, tokenizer: PreTrainedTokenizerBase, count: int) -> list[int]:
        """The first tokens.

        Raises:
            ValueError: there are fewer.
        """
        ids = tokenizer(self.text, add_special_tokens=False, verbose=False)["input_ids"]
        if len(ids) < count:
            raise ValueError(f"document {self.name}: expected at least {count} tokens, found {len(ids)}; ask for shorter --lengths")
        return ids[:count]


def reference() -> Iterator[Document]:
    """The topics of the language reference one behind the other, cut into pieces."""
    topics = pydoc_data.topics.topics
    text = "\n\n".join(topics[name] for name in sorted(topics))
    for number in range(len(text) // PIECE):
        yield Document(f"reference-{number}", text[number * PIECE : (number + 1) * PIECE])


def library() -> Iterator[Document]:
    """The source of modules."""
    directory = Path(sysconfig.get_path("stdlib"))
    for name in MODULES:
        yield Document(f"{name}.py", (directory / f"{name}.py").read_text(encoding="utf8"))


def documents(count: int) -> list[Document]:
    """The first documents, prose and code in turns.

    Raises:
        ValueError: there are fewer.
    """
    found = list(chain.from_iterable(zip(reference(), library())))
    if not 0 < count <= len(found):
        raise ValueError(f"--documents {count}: expected 1 to {len(found)}, as many as this Python has")
    return found[:count]


def digest(texts: Iterable[Document]) -> str:
    """Of all texts, in order: results of other texts are not compared."""
    return hashlib.sha256("".join(document.name for document in texts).encode()).hexdigest()[:12]
