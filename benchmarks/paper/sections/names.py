"""What the keys of results are called on the page."""

from __future__ import annotations

SHAPES = {
    "llama-3.1-8b": "Llama-3.1-8B",
    "qwen2.5-7b": "Qwen2.5-7B",
    "qwen3-8b": "Qwen3-8B",
    "qwen3-30b-a3b": "Qwen3-30B-A3B",
    "qwen3-32b": "Qwen3-32B",
    "minimax-m2-cut": "six layers of MiniMax-M2",
    "qwen3.5-27b-quarter": "a quarter of the layers of Qwen3.5-27B",
    "gpt-oss-20b": "gpt-oss-20B",
}
ABOUT = {  # what is to be known of a shape's figures, or of a file's
    "llama-3.1-8b": "For the default preset and stock SGLang, prompts that hit and single cold ones were measured later, alone on a machine. Those of "
    "`fast` are of a call before, in which stock SGLang's time per token was 1 to 2% shorter. First tokens after a hit took 0.93 to 2.05 of stock "
    "SGLang's with `fast` then, on a busy host. In all other cells another server ran on the host.",
    "llama-3.1-8b-same-kv": "Both servers had a GPU of one host, one after the other, beside the main comparison on its other GPU. FreeKV has "
    "`fast`. It replays c 0.13, x 0.21, as with tau 0.8. Stock SGLang decodes three prompts at once, so most of them wait for their first token.",
    "llama-3.1-8b-8-bit": "Two GPUs of one host were measured beside each other. Cells of 128K with the preset `fast` were measured once, and "
    "all of 128K while FlashInfer computed FreeKV's dense layer. All pages of the prompt of 1M tokens were on the device. Another prompt of "
    "that length, computed cold beside tests, had its first token after 556 s.",
    "llama-3.1-8b-long": "All pages were on the device, beside a copy on the host. The prompt was computed cold once, and stock SGLang was not "
    "measured beside it.",
    "llama-3.1-8b-recalled": "FlashInfer computed FreeKV's dense layer, and most cells keep no page on the device.",
    "minimax-m2-cut": "With dummy weights all tokens of a batch are routed to nearly the same experts. A step then reads fewer weights than "
    "the least time counts, and in service both sides take longer. One layer of the six is dense, where the whole model has one of 62. "
    "One request's step is as short as the host's work for it, at 32K as at 128K. The whole model's is longer than that.",
    "qwen3.5-27b-quarter": "Twelve layers have linear attention, and four have full attention. SGLang 0.5.23's Python ran over the compiled "
    "libraries of 0.5.17. KV is an eighth to a half of what stock SGLang's step reads. Weights are most of the rest, and FreeKV reads them, too.",
    "gpt-oss-20b": "Twelve of the 24 layers have full attention, and both systems keep the windows of the others on the device. Experts are in "
    "MXFP4. With dummy weights all tokens of a batch are routed to nearly the same ones, and in service both sides take longer. Other GPUs of "
    "the host ran tests meanwhile.",
}
ABOUT_LOAD = {  # the same of a load
    "llama-3.1-8b": "Each server had the machine and its 16 cores to itself, one after the other. Beyond 5 requests per second FreeKV's probably "
    "wait for SGLang's tokenizer. It takes some 80 ms for a document's prompt, one prompt after the other, and it streams all answers, too. "
    "In a run of November 28 FreeKV's scheduler had no queue at such a rate. Stock SGLang is bound by its decode steps.",
}
TITLED = {  # what a file has in its title
    "goodput-llama-3.1-8b-dynamic-batch": ", prompts tokenized in batches",
    "crossover-llama-3.1-8b-recalled": ", recalled pages",
    "crossover-llama-3.1-8b-recalled-fa3": ", recalled pages",
    "crossover-llama-3.1-8b-same-kv": ", with 16 GiB of KV memory",
}
EARLIER = (  # files of code before that of the others: what differs is what a prefill and a prefix hit take
    *(f"crossover-llama-3.1-8b-{suffix}" for suffix in ("8-bit", "long", "recalled")),
    *(f"crossover-{shape}" for shape in ("gpt-oss-20b", "minimax-m2-cut", "qwen3-30b-a3b", "qwen3.5-27b-quarter")),
    "ablation-llama-3.1-8b",
)
BACKENDS = {"fa3": "FlashAttention 3", "flashinfer": "FlashInfer"}
SYSTEMS = {"stock": "stock SGLang", "freekv": "FreeKV"}
SCENARIOS = {"long-input": "Long input", "long-generation": "Long generation", "long-both": "Long input and long generation"}
METHODS = {
    "full": "full attention",
    "window": "a window alone",
    "raas": "RaaS",
    "razor": "RazorAttention",
    "quest": "Quest",
    "arkvale": "ArkVale",
    "arkvale-copies": "ArkVale, host copies",
    "shadowkv": "ShadowKV",
    "infinigen": "InfiniGen",
    "infinigen-copies": "InfiniGen, host copies",
    "louiskv": "LouisKV's trigger",
    "freekv": "FreeKV",
}
ABLATION = {
    "base": "base: NHD units, one copy at a time",
    "+hybrid_layout": "+ units in one piece (HND)",
    "+double_buffer": "+ two buffers",
    "+speculation": "+ selection a step ahead",
    "+zero_copy": "+ a gather kernel for the copy engine",
    "+device_side": "+ no question to the host",
    "+graph": "+ one CUDA graph: FreeKV",
    "+slack": "FreeKV, device cache of twice the budget",
    "only-double_buffer": "base, two buffers",
    "only-speculation": "base, selection a step ahead",
    "only-zero_copy": "base, a gather kernel",
    "only-slack": "base, twice the device cache",
    "-hybrid_layout": "FreeKV without units in one piece",
    "-speculation": "FreeKV without selection a step ahead",
    "-graph": "FreeKV without the CUDA graph",
}
