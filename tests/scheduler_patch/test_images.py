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
