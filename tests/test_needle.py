"""The needle model and its prompts: exact lengths, answers that are there, answers that are right."""

import hashlib
import lzma
import os
import re
import subprocess

import numpy as np
import pytest

from benchmarks.needle import corpus, tasks, weights

MODEL = weights.MODEL
SECOND = {"model-00001-of-00002.safetensors": 13904056, "model-00002-of-00002.safetensors": 6164720}  # bytes


def random(seed):
    return np.random.default_rng(seed)


@pytest.mark.parametrize("length_tokens", [301, 1024, 4099], ids="length={}".format)
@pytest.mark.parametrize("task", ("magic-number", "code-word", "multi-value"))
def test_prompt_has_the_exact_length_and_states_the_answer(task, length_tokens):
    prompt = tasks.make_prompt(random(0), task, length_tokens, needle_count=8)
    assert len(prompt.token_ids) == length_tokens
    values = prompt.answer_text.split(",")
    assert len(values) == len(prompt.answer_positions)
    for value, position in zip(values, prompt.answer_positions):
        value_tokens = tuple(corpus.default_corpus().encode(value))
        assert prompt.token_ids[position : position + len(value_tokens)] == value_tokens


def test_same_seed_gives_the_same_prompt():
    first, second, other = (tasks.make_prompt(random(seed), "code-word", 512) for seed in (3, 3, 4))
    assert first == second
    assert first != other


@pytest.mark.parametrize("seed", range(2 * len(tasks.TASKS)))
def test_text_encodes_to_the_same_tokens(seed):
    task = tasks.TASKS[seed % len(tasks.TASKS)]
    prompt = tasks.make_prompt(random(seed), task, 1024 + seed)
    encode = corpus.default_corpus().encode
    assert encode(prompt.text) == list(prompt.token_ids)
    assert encode(prompt.messages[-1]["content"]) == list(prompt.turns[-1])
    assert encode(prompt.answer_text) == list(prompt.answer_token_ids)


def test_questions_share_the_document_as_prefix():
    document = tasks.make_document(random(0), 1024, tasks=["magic-number", "code-word"])
    assert len(document.token_ids) == 1024
    assert [fact.task for fact in document.facts[:2]] == ["magic-number", "code-word"]
    assert len({fact.question for fact in document.facts}) == len(document.facts)
    for fact in document.facts:
        assert document.ask(fact).token_ids[:1024] == document.token_ids


def test_history_continues_the_answered_prompt():
    first, second = (document := tasks.make_document(random(0), 1024)).facts[:2]
    answered = document.ask(first)
    answered_tokens = (*answered.token_ids, *answered.answer_token_ids, corpus.EOS)
    following = document.ask(second, history=[first])
    assert following.token_ids[: len(answered_tokens)] == answered_tokens
    assert corpus.default_corpus().encode(following.text) == list(following.token_ids)


def test_only_the_exact_answer_is_accepted():
    prompt = tasks.make_prompt(random(0), "magic-number", 512)
    answer = prompt.answer_token_ids
    assert prompt.is_answered_by(answer)
    assert prompt.is_answered_by([*answer, corpus.EOS, 7])
    assert not prompt.is_answered_by([*answer, 7])
    assert not prompt.is_answered_by(answer[:-1])
    assert not prompt.is_answered_by([])


def test_too_many_needles_are_refused():
    with pytest.raises(ValueError, match="fewer needles"):
        tasks.make_prompt(random(0), "magic-number", 128, needle_count=32)
    with pytest.raises(ValueError, match="expected one of"):
        tasks.make_prompt(random(0), "riddle", 1024)


def test_words_are_plain_and_short():
    words = corpus.default_corpus().words
    assert len(set(words)) == len(words) > 1000
    for word in words:
        assert word[1:].isalpha() and word.islower() and word.isascii()
        assert len(corpus.default_corpus().encode(word)) <= 2


@pytest.fixture(scope="module")
def transformers():
    return pytest.importorskip("transformers")


def test_chat_template_gives_the_prompt(transformers):
    tokenizer = transformers.AutoTokenizer.from_pretrained(MODEL)
    document = tasks.make_document(random(0), 1024)
    prompt = document.ask(document.facts[1], history=[document.facts[0]])
    rendered = tokenizer.apply_chat_template(list(prompt.messages), add_generation_prompt=True, return_dict=False)
    assert rendered == list(prompt.token_ids)


def test_model_answers(transformers):
    torch = pytest.importorskip("torch")
    model = transformers.AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    prompts = [tasks.make_prompt(random(seed), task, 1024) for task in ("magic-number", "code-word") for seed in range(6)]
    token_ids = torch.tensor([prompt.token_ids for prompt in prompts])
    with torch.inference_mode():
        outputs = model.generate(
            token_ids,
            attention_mask=torch.ones_like(token_ids),
            max_new_tokens=4,
            do_sample=False,
            eos_token_id=corpus.EOS,
            pad_token_id=corpus.EOS,
        )[:, token_ids.shape[1] :].tolist()
    right = sum(prompt.is_answered_by(output) for prompt, output in zip(prompts, outputs))
    assert right >= len(prompts) - 1


def test_packed_weights_are_unpacked_and_held_to_their_digests(tmp_path):
    file, packed = tmp_path / "model.safetensors", tmp_path / "model.safetensors.xz"
    packed.write_bytes(lzma.compress(b"weights"))
    assert weights.ready(tmp_path) == tmp_path and not file.exists()  # nothing says that they are kept packed
    (tmp_path / "SHA256SUMS").write_text(f"{hashlib.sha256(b'weights').hexdigest()}  {file.name}\n")
    weights.ready(tmp_path)
    assert file.read_bytes() == b"weights"
    file.write_bytes(b"of an earlier model")
    weights.ready(tmp_path)
    assert file.read_bytes() == b"weights" and len(list(tmp_path.iterdir())) == 3
    file.unlink()
    for content, found in (
        (lzma.compress(b"other weights"), "expected content of SHA256SUMS's"),
        (b"damaged", "expected a file packed by xz"),
    ):
        packed.write_bytes(content)
        with pytest.raises(ValueError, match=found):
            weights.ready(tmp_path)
        assert not file.exists()


def test_the_second_model_comes_back_from_the_history(tmp_path):
    def git(*words: str) -> str:
        return subprocess.run(["git", "-C", corpus.HERE, *words], capture_output=True, text=True).stdout.strip()

    if git("rev-parse", "--is-shallow-repository") != "false":
        pytest.skip("no whole history to look in")
    [command] = re.findall(r"git restore --source .*", (corpus.HERE / "README.md").read_text())
    elsewhere = {
        "GIT_DIR": git("rev-parse", "--absolute-git-dir"),
        "GIT_WORK_TREE": str(tmp_path),
        "GIT_INDEX_FILE": str(tmp_path / "index"),
    }
    subprocess.run(["bash", "-c", command], cwd=tmp_path, env=os.environ | elsewhere, check=True, timeout=300)
    found = tmp_path / "benchmarks" / "needle" / "model-gqa-4"
    assert {path.name: path.stat().st_size for path in found.glob("*.safetensors")} == SECOND
    assert (found / "tokenizer.json").read_bytes() == (MODEL / "tokenizer.json").read_bytes()
