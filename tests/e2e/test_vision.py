"""Tiny models that read images: as stock SGLang within the budget, and as the oracle beyond it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES as CLASSES

import engines
from oracle import Oracle, OracleSettings
from room import wait_for_room
from seeing import FAMILIES, encoded, inputs, make_model, picture
from sglang_freekv.architectures import TESTED_WITH_IMAGES, TESTED_WITH_WINDOWS

pytestmark = pytest.mark.two_servers  # not on 0.5.17, where stock SGLang loses a batch of requests with images

NEW_TOKENS, CHUNK = 24, 128
SETTINGS = OracleSettings(budget=320, sink=16, window=32, tau=0.8, page=8, digest="two-bit", hysteresis=1.0)
OF_HYBRIDS = replace(SETTINGS, tau=0.0, hysteresis=0.3)  # their queries turn more, and their pages are more alike
SLOTS = 40  # for states
STATES = 64  # a hit of a hybrid ends at a state, which is kept behind so many tokens of a prompt
BEFORE = 112  # tokens of a byte each, before an image in two chunks
SHORT, PLAIN = "{}what is it? " + "abc def " * 20, "what is this? " + "ghi jkl mno " * 60
LONG = PLAIN[:BEFORE] + "{}" + PLAIN[BEFORE:]
TWO = "{}and what is that?"
ASKED = {  # name -> text and the seeds of its images, in the order of asking
    "short": (SHORT, 0), "again": (SHORT, 0), "other image": (SHORT, 1), "two images": (SHORT + TWO, 0, 1),
    "two, the other way": (SHORT + TWO, 1, 0), "long": (LONG, 2), "long, again": (LONG, 2), "long, other image": (LONG, 3),
    "long, two images": (LONG + TWO, 2, 3), "text": (PLAIN,),
}  # fmt: skip
WITHIN = tuple(ASKED)[:5]
TOGETHER = [(SHORT, seed) for seed in range(6)]  # asked at once
BEYOND = "long", "long, other image", "long, two images", "text"
PICTURED = list(dict.fromkeys([*(each for each in ASKED.values() if len(each) > 1), *TOGETHER]))  # stock SGLang is asked these at once
UNREAD = SHORT, 0, 1  # two images, and a place for one
ENDED = (SHORT, 3), (SHORT + PLAIN * 6, 0)  # aborted behind so many tokens, and in a chunk of its prompt
ENGINE = dict(
    device="cpu", dtype="float32", max_total_tokens=8192, max_running_requests=4, random_seed=0, enable_multimodal=True,
    mm_attention_backend="sdpa", chunked_prefill_size=CHUNK,
)  # fmt: skip
HYBRIDS = frozenset(name for name, family in FAMILIES.items() if family.published)
WINDOWED = frozenset(name for name, family in FAMILIES.items() if "sliding_attention" in family.text.get("layer_types", ()))
STOCK = dict(attention_backend="torch_native")
OURS = dict(
    kv_retrieval="freekv",
    freekv_budget=SETTINGS.budget,
    freekv_sink=SETTINGS.sink,
    freekv_window=SETTINGS.window,
    freekv_resident_memory=0,
)
STRICT = {"SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1"}
RETRACT_EVERY = 5  # passes


def test_the_architectures_that_are_called_tested_are_these():
    names = {name: CLASSES[family.kind] for name, family in FAMILIES.items()}
    assert set(names.values()) == TESTED_WITH_IMAGES
    assert {names[name] for name in WINDOWED} == TESTED_WITH_IMAGES & TESTED_WITH_WINDOWS


def settings_of(name: str) -> OracleSettings:
    return OF_HYBRIDS if name in HYBRIDS else SETTINGS


def request(name: str, text: str, *seeds: int) -> dict:
    images = [encoded(picture(seed)) for seed in seeds]
    return {"prompt": text.format(*[FAMILIES[name].picture] * len(seeds))} | ({"image_data": images} if images else {})


def at_once(name: str, asked: list[tuple]) -> dict:
    alone = [request(name, *each) for each in asked]
    return {key: [one[key] for one in alone] for key in alone[0]}


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("vision")
    for name, family in FAMILIES.items():
        make_model(family, directory / name)
    return directory


@pytest.fixture(scope="module")
def answers(models) -> dict[str, list]:
    """``stock-NAME`` -> answers to those of PICTURED, and one to the text. ``ours-NAME`` -> an answer to each of ASKED, the answers to
    those of TOGETHER, the refusal of UNREAD, what each of ENDED said, and what is held then."""
    jobs = {}
    for name in FAMILIES:
        job = {"new_tokens": NEW_TOKENS, "has_states": name in HYBRIDS}
        engine = ENGINE | {"model_path": str(models / name)} | ({"max_mamba_cache_size": SLOTS} if name in HYBRIDS else {})
        chosen = {f"freekv_{field}": getattr(settings_of(name), field) for field in ("tau", "hysteresis")}
        asked = [at_once(name, PICTURED), request(name, PLAIN)]
        jobs[f"stock-{name}"] = job | {"engine": engine | STOCK, "requests": asked}
        asked = [*(request(name, *each) for each in ASKED.values()), at_once(name, TOGETHER)]
        aborted = [request(name, text, 0) | {"tokens": tokens} for text, tokens in ENDED]
        text, *seeds = UNREAD
        refused = [request(name, text, *seeds) | {"prompt": request(name, text, 0)["prompt"]}]
        job |= {"retract_every": RETRACT_EVERY, "requests": asked, "refused": refused, "aborted": aborted}
        jobs[f"ours-{name}"] = job | {"engine": engine | OURS | chosen}
    wait_for_room(1)
    return engines.run_all(jobs, models, STRICT)


def stock_of(answers: dict[str, list], name: str) -> dict[tuple, list[int]]:
    """Text and seeds -> stock SGLang's tokens."""
    pictured, text = answers[f"stock-{name}"]
    return {each: answer["output_ids"] for each, answer in zip([*PICTURED, (PLAIN,)], [*pictured, text], strict=True)}


def ours_of(answers: dict[str, list], name: str) -> dict[str, dict]:
    return dict(zip(ASKED, answers[f"ours-{name}"]))


def ends(name: str, tokens: int) -> int:
    """Where a hit ends that shares so many tokens with a prompt before."""
    grid = STATES if name in HYBRIDS else SETTINGS.page
    return tokens // grid * grid


@pytest.mark.parametrize("name", FAMILIES)
def test_within_the_budget_tokens_are_stock_sglangs(answers, name):
    stock, ours = stock_of(answers, name), ours_of(answers, name)
    assert all(ours[asked]["output_ids"] == stock[ASKED[asked]] for asked in WITHIN)
    assert len({tuple(stock[ASKED[asked]]) for asked in WITHIN}) == len(WITHIN) - 1  # each image is read, and its place


@pytest.mark.parametrize("name", FAMILIES)
def test_the_same_image_is_a_hit_and_another_is_none(answers, name):
    ours = ours_of(answers, name)
    length = {asked: answer["meta_info"]["prompt_tokens"] for asked, answer in ours.items()}
    hits = {asked: answer["meta_info"]["cached_tokens"] for asked, answer in ours.items()}
    assert hits["short"] == hits["other image"] == hits["long"] == 0
    for again, before in (("again", "short"), ("long, again", "long")):
        assert hits[again] == ends(name, length[before] - 1) and ours[again]["output_ids"] == ours[before]["output_ids"]
    for both, first in (("two images", "short"), ("two, the other way", "other image"), ("long, two images", "long")):
        assert hits[both] == ends(name, length[first])
    ends_behind_chunks = name in HYBRIDS | WINDOWED  # with a state or a window, and none of them before the image
    assert hits["long, other image"] == (0 if ends_behind_chunks else BEFORE)


@pytest.mark.parametrize("name", FAMILIES)
def test_requests_that_are_retracted_go_on_with_their_images(answers, name):
    stock, ours = stock_of(answers, name), answers[f"ours-{name}"][len(ASKED)]
    assert sum(answer["meta_info"]["num_retractions"] for answer in ours) > 0
    assert [answer["output_ids"] for answer in ours] == [stock[each] for each in TOGETHER]


@pytest.mark.parametrize("name", FAMILIES)
def test_an_image_without_a_place_is_refused(answers, name):
    refusal = answers[f"ours-{name}"][len(ASKED) + 1]
    assert refusal.startswith("image_data: expected an image for each of the 1 that the prompt has a place for, found 2; ")


@pytest.mark.parametrize("name", FAMILIES)
def test_an_aborted_request_with_an_image_leaves_nothing(answers, name):
    *said, held = answers[f"ours-{name}"][len(ASKED) + 2 :]
    for (_, tokens), last in zip(ENDED, said, strict=True):
        assert last["meta_info"]["finish_reason"]["type"] == "abort" and bool(last["output_ids"]) == bool(tokens)
    assert held["rows_used"] == held["host_pages_used"] == 0
    assert held.get("states", {}).get("used") == (0 if name in HYBRIDS else None)
    assert held.get("windows", {}).get("used") == (0 if name in WINDOWED else None)


@pytest.mark.parametrize("name", FAMILIES)
def test_beyond_the_budget_tokens_are_the_oracles(models, answers, name):
    """But for images of Mistral 3, of which stock SGLang itself makes other tokens than transformers."""
    oracle, stock, ours = Oracle(models / name), stock_of(answers, name), ours_of(answers, name)
    for each in ["text"] if name.startswith("mistral") else BEYOND:
        text, *seeds = ASKED[each]
        seen = inputs(models / name, request(name, text, *seeds)["prompt"], [picture(seed) for seed in seeds])
        token_ids, _ = seen.pop("input_ids")[0].tolist(), seen.pop("attention_mask")
        dense, retrieved = (oracle.generate(token_ids, NEW_TOKENS, settings, seen=seen) for settings in (None, settings_of(name)))
        assert stock[ASKED[each]] == dense.tokens
        assert ours[each]["output_ids"] == retrieved.tokens
        corrected = [flag for step in retrieved.corrected for layer in step for flag in layer]
        assert ours[each]["meta_info"]["freekv"]["corrections"] == sum(corrected) < len(corrected)
    assert any(ours[each]["output_ids"] != stock[ASKED[each]] for each in BEYOND)
    assert all(ours[each]["meta_info"]["freekv"]["recalled_units"] > 0 for each in BEYOND)
