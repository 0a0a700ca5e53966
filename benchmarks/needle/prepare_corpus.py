"""Collect the English prose of the haystack and, for a new model, train its tokenizer.

The shipped sentences are the documentation strings of CPython 3.11, encoded with the shipped
tokenizer:

    python -m benchmarks.needle.prepare_corpus --model model --data data

A new tokenizer is trained when the model directory has none.
"""

import argparse
import ast
import glob
import gzip
import pydoc_data.topics
import re
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

VOCABULARY_SIZE = 5120
SPECIAL_TOKENS = ["<s>", "</s>", "<|user|>", "<|assistant|>"]
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m['role'] == 'assistant' %}<|assistant|>{{ m['content'] }}</s>"
    "{% else %}<|user|>{{ m['content'] }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
TASK_PHRASES = [
    "The special magic number for the city is: What is the special magic number? The answer is",
    "VAR ABC = 12345. Find all variables that are assigned the value",
]
DOCUMENTED_NODES = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
REJECTED_SENTENCE = re.compile(
    r"https?:|\S@\S|\(c\)|copyright|<s>|</s>"
    r"|\b(contributed|written|cloned|adapted|developed) (and \w+ )?by\b"
    r"|\b(author|crap|suck|dumb|kill)|Erich Gamma|Robert Olson|Tim Peters",
    re.IGNORECASE,
)


def python_documentation() -> Iterator[str]:
    """The language reference topics and the long docstrings of the running Python's library."""
    yield from pydoc_data.topics.topics.values()
    library = Path(sysconfig.get_path("stdlib"))
    for path in sorted(library.rglob("*.py")):
        if {"site-packages", "test"} & set(path.parts):
            continue
        try:
            tree = ast.parse(path.read_text(encoding="utf8"))
        except (SyntaxError, UnicodeDecodeError):
            continue  # the library ships deliberately broken files for its own tools
        for node in ast.walk(tree):
            docstring = ast.get_docstring(node) if isinstance(node, DOCUMENTED_NODES) else None
            if docstring and len(docstring) > 120:
                yield docstring


def text_files(patterns: Iterable[str]) -> Iterator[str]:
    """The contents of plain or gzipped text files."""
    for pattern in patterns:
        for name in sorted(glob.glob(pattern, recursive=True)):
            opener = gzip.open if name.endswith(".gz") else open
            with opener(name, "rt", encoding="utf8", errors="replace") as file:
                yield file.read()


def prose_paragraphs(texts: Iterable[str]) -> list[str]:
    """Paragraphs of plain ASCII that are mostly letters, each once."""
    paragraphs = {}
    for text in texts:
        for paragraph in re.split(r"\n\s*\n", text):
            paragraph = re.sub(r"\s+", " ", paragraph).strip()
            letters = sum(character.isalpha() or character == " " for character in paragraph)
            if len(paragraph) >= 80 and letters > 0.85 * len(paragraph) and paragraph.isascii():
                paragraphs[paragraph] = None
    return list(paragraphs)


def sentences_of(paragraphs: Iterable[str]) -> list[str]:
    """Sentences with their leading space, so that they can be joined as they are."""
    return [
        " " + sentence
        for paragraph in paragraphs
        for sentence in re.split(r"(?<=[.!?]) ", paragraph)
        if 20 < len(sentence) < 400 and sentence[-1] in ".!?" and not REJECTED_SENTENCE.search(sentence)
    ]


def train_tokenizer(paragraphs: list[str]) -> Tokenizer:
    """Byte-level BPE in which every group of three digits is one token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\d{1,3}"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    all_numbers = " ".join(f"{number:03d}" for number in range(1000))
    tokenizer.train_from_iterator(paragraphs + TASK_PHRASES * 50 + [all_numbers] * 400, trainer)
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, directory: Path) -> None:
    """Write tokenizer.json and the files Hugging Face reads beside it."""
    from transformers import PreTrainedTokenizerFast

    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="</s>")
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(directory)


def save_sentences(tokenizer: Tokenizer, sentences: list[str], directory: Path) -> int:
    """Write the token ids of all sentences and where each starts; returns the token count."""
    encoded = [encoding.ids for encoding in tokenizer.encode_batch(sentences)]
    starts = np.cumsum([0] + [len(token_ids) for token_ids in encoded])
    directory.mkdir(parents=True, exist_ok=True)
    np.save(directory / "sentence_tokens.npy", np.concatenate(encoded).astype(np.uint16))
    np.save(directory / "sentence_starts.npy", starts.astype(np.int32))
    return int(starts[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", type=Path, required=True, help="directory of the tokenizer, trained if missing")
    add("--data", type=Path, required=True, help="where the sentences are written")
    add("--text", action="append", default=[], metavar="GLOB", help="further text files to read")
    arguments = parser.parse_args()

    paragraphs = prose_paragraphs([*python_documentation(), *text_files(arguments.text)])
    if not (arguments.model / "tokenizer.json").exists():
        save_tokenizer(train_tokenizer(paragraphs), arguments.model)
    tokenizer = Tokenizer.from_file(str(arguments.model / "tokenizer.json"))
    sentences = sentences_of(paragraphs)
    tokens = save_sentences(tokenizer, sentences, arguments.data)
    print(f"{len(paragraphs)} paragraphs, {len(sentences)} sentences, {tokens} tokens")


if __name__ == "__main__":
    main()
