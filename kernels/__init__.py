"""Device kernels and their PyTorch references."""

if __name__ == "kernels":  # the checkout root is on sys.path, and someone asks for Hugging Face's `kernels`
    from ._shadow import hand_over

    hand_over()
else:
    from sglang_freekv.kernels.reference import (
        append_tokens,
        attend_pages,
        digest_pages,
        extend_attention,
        fill_pages,
        needs_correction,
        offload_pages,
        plan_slots,
        recall_pages,
        score_pages,
        select_pages,
        stage_pages,
    )

    __all__ = [
        "append_tokens",
        "attend_pages",
        "digest_pages",
        "extend_attention",
        "fill_pages",
        "needs_correction",
        "offload_pages",
        "plan_slots",
        "recall_pages",
        "score_pages",
        "select_pages",
        "stage_pages",
    ]
