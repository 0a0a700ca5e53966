"""Hooks for models that read images."""

from types import SimpleNamespace

import pytest

from sglang_freekv import releases
from sglang_freekv.scheduler_patch import images


@pytest.mark.skipif(not releases.has("extend end"), reason="SGLang 0.5.17 has no cache of images")
def test_a_processor_that_wraps_another_clears_the_others_images():
    from sglang.srt.multimodal.processors.base_processor import BaseMultimodalProcessor

    original, inner = BaseMultimodalProcessor.clear_preprocess_cache, SimpleNamespace(mm_preprocess_cache={"an image": 1})
    wrapper = SimpleNamespace(inner=inner)
    with pytest.raises(AttributeError):
        original(wrapper)
    images.clear_cache(original, wrapper)
    assert not inner.mm_preprocess_cache
    inner.mm_preprocess_cache["another"] = 1
    images.clear_cache(original, inner)
    assert not inner.mm_preprocess_cache


def item(*places, sizes=None):
    return SimpleNamespace(offsets=list(places), model_specific_data={"image_sizes": sizes} if sizes else {})


ONE, TWO = item((1, 24)), item((27, 50))


@pytest.mark.parametrize("sent, items", [
    (None, None), ([], None), ([None], None), (None, []), ("a", [ONE]), (["a"], [ONE]), (["a", None], [ONE]), (["a", "b"], [ONE, TWO]),
    (["a", "b"], [item((1, 24), (27, 50))]), (["a"], [item((1, 4), (6, 9))]),  # an item of all images, and an image of two rows
    (["a"], [item()]), (["a"], [SimpleNamespace(offsets=None)]), (["a", "b"], [item((1, 4), (6, 9), (11, 14), sizes=[[2, 4], [1, 4]])]),
])  # fmt: skip
def test_images_with_a_place_are_taken(sent, items):
    images.refuse_unread(sent, None if items is None else SimpleNamespace(mm_items=items))


@pytest.mark.parametrize("sent, items, named", [
    ("a", None, "reads text alone, found 1; "), (["a", "b"], None, "reads text alone, found 2; "),
    (["a"], [], "each of the 0 that the prompt has a place for, found 1; "), (["a", "b"], [ONE], "each of the 1 that .*, found 2; "),
    (["a", None, "b"], [ONE], "each of the 1 that .*, found 2; "),
    (["a", "b"], [item((1, 4), (6, 9), sizes=[[2, 4]])], "each of the 1 that .*, found 2; "),  # one image of two rows, of Mistral 3
])  # fmt: skip
def test_images_without_a_place_are_refused(sent, items, named):
    """SGLang would answer as if they had not been sent."""
    with pytest.raises(ValueError, match=f"^image_data: expected .*{named}"):
        images.refuse_unread(sent, None if items is None else SimpleNamespace(mm_items=items))


GEMMA = SimpleNamespace(hf_config=SimpleNamespace(mm_tokens_per_image=3, boi_token_index=7, eoi_token_index=9))
IMAGE = [7, 8, 8, 8, 9]


def reads(*prompt: int) -> SimpleNamespace:
    """What SGLang's processor finds in a prompt: runs of 8."""
    begins = [place for place, token in enumerate(prompt) if token == 8 and (place == 0 or prompt[place - 1] != 8)]
    ends = [place for place, token in enumerate(prompt) if token == 8 and prompt[place + 1 : place + 2] != (8,)]
    return SimpleNamespace(mm_items=[item(*zip(begins, ends))])


@pytest.mark.parametrize("prompt", [[*IMAGE], [1, *IMAGE, 2], [*IMAGE, *IMAGE, 1]])
def test_tokens_of_images_in_their_places_are_taken(prompt):
    images.refuse_stray(GEMMA, prompt, reads(*prompt))


@pytest.mark.parametrize("prompt, found", [
    ([8, *IMAGE], (1, 2, 1, 1)), ([*IMAGE, 8], (1, 2, 1, 1)), ([*IMAGE, 7, 8, 8, 9], (1, 2, 2, 2)), ([*IMAGE, 7], (1, 1, 2, 1)),
    ([9, *IMAGE], (1, 1, 1, 2)), ([8, 8, 8, 9], (0, 1, 0, 1)), ([7, 8, 8, 8], (0, 1, 1, 0)), ([*IMAGE, 7, 9], (1, 1, 2, 2)),
    ([7, 8, 8, 8, 8, 9], (0, 1, 1, 1)),
])  # fmt: skip
def test_stray_tokens_of_images_are_refused(prompt, found):
    """SGLang's scheduler would end, or keep an image for another."""
    with pytest.raises(
        ValueError, match="^image_data: expected .* their {} places alone, found {} runs .* {} that begin .* {} that end".format(*found)
    ):
        images.refuse_stray(GEMMA, prompt, reads(*prompt))


def test_stray_tokens_matter_to_no_other_model_and_no_text():
    images.refuse_stray(SimpleNamespace(hf_config=SimpleNamespace()), [8, *IMAGE], reads(8, *IMAGE))
    images.refuse_stray(GEMMA, [8, 9], None)
