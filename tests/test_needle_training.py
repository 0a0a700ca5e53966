"""Training of the needle model: its examples, optimizers, checkpoints and exported files."""

import json
import re

import numpy as np
import pytest
import torch

from benchmarks.needle import corpus, evaluation, facts, network, optimizers, tasks, train, training_data

CORPUS = corpus.default_corpus()
TINY = ["--device", "cpu", "--shape", "tiny", "--step-tokens", "512", "--workers", "0", "--evaluate-prompts", "2", "--evaluate", "512"]


def tiny_network(seed=0):
    torch.manual_seed(seed)
    return network.Network(network.SHAPES["tiny"], CORPUS.tokenizer.get_vocab_size())


@pytest.mark.parametrize("length_tokens", (256, 513, 4096))
def test_examples_have_the_exact_length_and_end_with_their_answers(length_tokens):
    rng, seen = np.random.default_rng(0), set()
    for _ in range(60):
        example = training_data.make_example(rng, length_tokens, CORPUS)
        assert len(example.token_ids) == length_tokens
        text = CORPUS.decode(example.token_ids)
        assert CORPUS.encode(text) == example.token_ids
        answers = [CORPUS.decode(example.token_ids[start : start + length]) for _, start, length in example.answers]
        turns = [turn.split("<|assistant|>")[1] for turn in text.split("<|user|>")[2:]]
        assert answers == turns
        seen |= {task for task, _, _ in example.answers}
    assert seen == set(tasks.TASKS)


def test_batch_chooses_the_tokens_before_the_answers():
    batch = training_data.make_batch(np.random.default_rng(1), 512, 8, CORPUS)
    assert batch.token_ids.shape == (8, 513)
    inputs, targets = batch.token_ids[:, :-1].flatten()[batch.chosen], batch.token_ids[:, 1:].flatten()[batch.chosen]
    for task in ("magic-number", "multi-query", "running-state"):
        of_task = batch.kinds == tasks.TASKS.index(task)
        answers = "".join(CORPUS.decode([token]) for token in targets[of_task]).split("</s>")[:-1]
        assert (inputs[of_task] == corpus.ASSISTANT).sum() == len(answers) > 0
        pattern = {"magic-number": r" \d{6}", "multi-query": r"( [a-z]+ [a-z]+ is \d{6},?){2,4}", "running-state": r" \d(, \d+: .*)+\."}
        for answer in answers:
            assert re.fullmatch(pattern[task], answer)
    assert (batch.weights[batch.kinds == training_data.PROSE] == np.float32(training_data.PROSE_WEIGHT)).all()


def test_every_call_and_worker_has_its_own_data():
    first, again, other = (next(iter(training_data.Batches(CORPUS, (256,), 512, (0, call)))).token_ids for call in (1, 1, 2))
    assert torch.equal(first, again) and not torch.equal(first, other)


def test_muon_is_torch_muon(monkeypatch):
    monkeypatch.setattr(optimizers, "PRECISION", torch.float32)  # bfloat16's rounding is the processor's, and hides small faults
    monkeypatch.setattr(torch.Tensor, "bfloat16", lambda tensor: tensor.to(torch.float32, copy=True))
    ours, theirs = tiny_network(), tiny_network()
    matrices = [[p for p in model.layers.parameters() if p.dim() == 2] for model in (ours, theirs)]
    muons = [
        optimizers.Muon(matrices[0], lr=0.01),
        torch.optim.Muon(matrices[1], lr=0.01, weight_decay=0.05, adjust_lr_fn="match_rms_adamw"),
    ]
    for step in range(3):
        torch.manual_seed(step)
        for left, right in zip(*matrices):
            left.grad = torch.randn_like(left)
            right.grad = left.grad.clone()
        for muon in muons:
            muon.step()
    for start, left, right in zip(tiny_network().layers.parameters(), ours.layers.parameters(), theirs.layers.parameters()):
        if start.dim() == 2:
            assert (left - right).norm() < 1e-4 * (right - start).norm() > 0


@pytest.mark.parametrize("optimizer", ("muon", "adamw"))
def test_loss_falls_on_one_batch(optimizer):
    model = tiny_network()
    arguments = train.parse_arguments(["--output", "unused", "--optimizer", optimizer, "--device", "cpu", "--total-seconds", "1"])
    trainer = train.Trainer(model, arguments)
    trainer.fresh_step = -train.WARM_UP_STEPS
    batch = training_data.make_batch(np.random.default_rng(0), 128, 2, CORPUS)
    losses = []
    for _ in range(30):
        trainer.loss.zero_()
        trainer._step(batch)
        losses.append(trainer.loss.item() * 10)
    assert losses[0] > 8 and losses[-1] < 0.5 * losses[0]


def test_training_resumes_and_exports(tmp_path, capsys):
    output = tmp_path / "model"
    words = ["--output", str(output), *TINY, "--seconds", "2", "--total-seconds", "4", "--plan", "128:0.5,128+256:0.5"]
    train.main(words)
    first = json.loads((output / "training.json").read_text())
    assert first["calls"] == 1 and 2 <= first["seconds"] < 4 and first["steps"] > 0
    saved = torch.load(output / "checkpoint.pt")
    continued = train.Trainer(tiny_network(1), train.parse_arguments(words))
    continued.resume()
    assert all(torch.equal(tensor, saved["network"][name]) for name, tensor in continued.network.state_dict().items())
    moved = continued.optimizers[1].state_dict()["state"][0]["momentum"]
    assert moved.any() and torch.equal(moved, saved["optimizers"][1]["state"][0]["momentum"])

    train.main(words)
    second = json.loads((output / "training.json").read_text())
    assert second["calls"] == 2 and second["seconds"] >= 4 and second["steps"] > first["steps"]
    report = json.loads((output / "evaluation.json").read_text())
    assert report["512"].keys() == set(tasks.TASKS)
    assert all(0 <= value <= 1 for shares in report["512"].values() for value in shares.values())

    (output / "checkpoint.pt").unlink()
    continued = train.Trainer(tiny_network(1), train.parse_arguments([*words, "--start-from", str(output)]))
    continued.resume()
    assert continued.progress() == second and continued.fresh_step == second["steps"]


def test_exported_model_is_the_trained_one(tmp_path):
    transformers = pytest.importorskip("transformers")
    model = tiny_network()
    with torch.no_grad():
        for parameter in model.parameters():  # as they are exported, and no norm left at one
            parameter.copy_((parameter + 0.1 * torch.randn_like(parameter)).bfloat16())
    network.export(model, corpus.HERE / "model", tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    token_ids = torch.randint(0, 5000, (2, 300))
    with torch.no_grad():
        ours = model.logits(model(token_ids)).unflatten(0, (2, -1))
        torch.testing.assert_close(ours, loaded(token_ids).logits, rtol=1e-3, atol=1e-3)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer.apply_chat_template([{"role": "user", "content": "a"}], add_generation_prompt=True)

    other = tiny_network(1)
    network.load_weights(other, tmp_path)
    assert all(torch.equal(left, right) for left, right in zip(model.parameters(), other.parameters()))


@pytest.mark.parametrize("name", ("needle", "gqa-4"))
def test_shards_are_small(name, tmp_path):
    model = network.Network(network.SHAPES[name], CORPUS.tokenizer.get_vocab_size())
    network.export(model, corpus.HERE / "model", tmp_path)
    sizes = [file.stat().st_size for file in tmp_path.glob("*.safetensors")]
    assert max(sizes) < 15e6 and sum(sizes) < 30e6


def test_compiled_once_for_all_layers_and_lengths(monkeypatch):
    graphs, compile = [], torch.compile

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    monkeypatch.setattr(torch, "compile", lambda function, dynamic: compile(function, dynamic=dynamic, backend=backend))
    model, token_ids = tiny_network(), torch.randint(0, 5000, (4, 64))
    plain = model(token_ids)
    model.compile()
    torch.testing.assert_close(model(token_ids), plain)
    model(token_ids.view(2, 128))
    assert len(graphs) == 2


def test_right_tokens_end_at_the_first_error(monkeypatch):
    """A network that says what it reads twenty tokens before: right wherever the text repeats itself."""

    class Repeater(torch.nn.Module):
        norm = torch.zeros(1)

        def forward(self, token_ids):
            return torch.cat([token_ids.new_full((len(token_ids), 19), 7), token_ids], 1)[:, : token_ids.shape[1]].flatten()

        def logits(self, hidden):
            return torch.nn.functional.one_hot(hidden, 100).float()

    prompt = list(range(20, 40))
    answers = [prompt[:6], [*prompt[:3], 99, *prompt[4:6]], [99], prompt[:1]]
    questions = [(prompt, answer) for answer in answers]
    assert evaluation.right_tokens(Repeater(), questions) == [6, 3, 0, 1]


def test_evaluation_asks_what_make_prompt_asks():
    ((prompt, answer),) = evaluation.make_questions(np.random.default_rng(3), "running-state", 800, 1, CORPUS)
    due = tasks.make_prompt(np.random.default_rng(3), "running-state", 800)
    assert tuple(prompt) == due.token_ids and tuple(answer) == (*due.answer_token_ids, corpus.EOS)


def test_schedule_warms_up_stays_and_falls():
    scale = train.learning_rate_scale
    assert scale(0.1, 0) == 1 / train.WARM_UP_STEPS
    assert scale(0.1, train.WARM_UP_STEPS // 2 - 1) == 0.5
    assert scale(0.1, 500) == scale(0.4, 500) == 1
    assert scale(0.7, 500) == pytest.approx(0.5) and scale(1.0, 500) == scale(1.2, 500) == train.LAST_SCALE


def test_recipes_add_up():
    assert sum(training_data.RECIPES.values()) == pytest.approx(1) == sum(training_data.MIXTURE.values())
    assert sum(facts.MIXTURE.values()) == pytest.approx(1)
