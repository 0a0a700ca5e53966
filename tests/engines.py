"""SGLang engines, one after the other, each a fork of a process that has imported SGLang: ``python engines.py JOBS``.

An engine takes seconds so, where a server takes half a minute of a core to import SGLang three times.
"""

from __future__ import annotations

import asyncio
import gc
import json
import multiprocessing
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from sglang_freekv.scheduler_patch.cpu import cpu_environment

ABORTED, ENDLESS = "aborted", 2000  # the name of a request that is aborted, and more tokens than it will have


def run_all(jobs: dict[str, dict[str, Any]], directory: Path, environment: dict[str, str] | None = None) -> dict[str, list[dict]]:
    """Serve all jobs, and return the answers of each, in the order of its prompts.

    Args:
        jobs: name -> ``{"engine": keyword arguments of Engine, "prompts": token ids, "new_tokens": number}``; and
            ``has_states`` if the model has linear attention, ``has_sinks`` if it has learned sinks, and sliding-window layers beside full
            ones. In place of the prompts there may be ``requests``, keyword arguments of ``Engine.generate``, which are answered one after
            the other; and ``refused``, the same, of which the refusal follows the answers. ``aborted`` have ``tokens`` besides, behind which
            each of them is aborted. What each of these has said in the end follows, and then what the scheduler holds of the KV. With ``retract_every`` one of several requests is
            retracted every so many passes. ``kv_scales`` are those of keys and values that all layers have, as by a checkpoint.
        directory: for the log and the answers of each job.
        environment: variables for all of them.

    Raises:
        RuntimeError: an engine failed; with the end of its log.
    """
    file = directory / "jobs.json"
    file.write_text(json.dumps(jobs))
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""} | cpu_environment() | (environment or {})
    subprocess.run([sys.executable, "-P", __file__, str(file)], env=environment, check=True, timeout=1800)
    for name in jobs:
        if not (directory / f"{name}.json").exists():
            raise RuntimeError(f"{name}: the engine failed\n" + (directory / f"{name}.log").read_text(errors="replace")[-4000:])
    return {name: json.loads((directory / f"{name}.json").read_text()) for name in jobs}


def serve(job: dict[str, Any], answers: Path) -> None:
    """In a fork: run one engine on the prompts of ``job``, and write what it answers."""
    import sglang
    from sglang.srt.managers import scheduler

    if job.get("has_states"):
        serve_states("kv_retrieval" in job["engine"])
    if job.get("has_sinks") and "kv_retrieval" not in job["engine"]:
        serve_windows()
    if "kv_scales" in job:
        have_scales(*job["kv_scales"])
    if "retract_every" in job:
        scheduler.TEST_RETRACT, scheduler.TEST_RETRACT_INTERVAL = True, job["retract_every"]
    engine = sglang.Engine(**job["engine"])
    sampling = {"temperature": 0, "max_new_tokens": job["new_tokens"], "ignore_eos": True}
    if "requests" in job:
        found = [engine.generate(**request, sampling_params=sampling) for request in job["requests"]]
    else:
        found = engine.generate(input_ids=job["prompts"], sampling_params=sampling)
    found += [refusal(engine, **request) for request in job.get("refused", ())]
    for request in job.get("aborted", ()):
        found.append(engine.loop.run_until_complete(abort(engine, **request)))
    if "aborted" in job:
        engine.flush_cache()
        found.append(engine.loop.run_until_complete(held(engine)))
    answers.write_text(json.dumps(found))
    engine.shutdown()


def refusal(engine, **request) -> str:
    """What a request is told that is refused; empty if it is answered."""
    try:
        engine.generate(**request, sampling_params={"max_new_tokens": 1})
    except ValueError as error:
        return str(error)
    return ""


async def abort(engine, tokens: int, **request) -> dict:
    """Abort a request behind so many of its tokens; with 0, while its prompt is computed. What it said last."""
    sampling = {"temperature": 0, "max_new_tokens": ENDLESS, "ignore_eos": True}
    coming = await engine.async_generate(**request, sampling_params=sampling, stream=True, rid=ABORTED)
    said = asyncio.ensure_future(anext(coming))
    while tokens == 0 and (await held(engine))["rows_used"] == 0:
        assert not said.done()
    last = await said if tokens else None
    while tokens and last["meta_info"]["completion_tokens"] < tokens:
        last = await anext(coming)
    engine.tokenizer_manager.abort_request(ABORTED)
    last = await said if last is None else last
    async for said_last in coming:
        last = said_last
    while (await held(engine))["rows_used"]:
        await asyncio.sleep(0.02)
    return last


async def held(engine) -> dict:
    """The ``freekv`` state of the engine's scheduler."""
    return (await engine.tokenizer_manager.get_internal_state())[0]["freekv"]


def serve_states(retrieves: bool) -> None:
    """Have SGLang serve linear attention as on a GPU, with states of float32. Without KV retrieval nobody gives it what a CPU lacks."""
    os.environ["SGLANG_MAMBA_CONV_DTYPE"] = "float32"
    if retrieves:
        return
    from sglang_freekv.scheduler_patch import FRONT, SCHEDULER_ON_CPU, linear_attention, registry

    hooks = [patch for patch in FRONT + SCHEDULER_ON_CPU if patch.hook.startswith("linear_attention:")]
    registry.apply(hooks)
    linear_attention._device.set("cpu")


def have_scales(*scales: float) -> None:
    """Have every attention layer scales of keys and values, as SGLang loads them from a checkpoint. It takes such a one in 16 bits alone."""
    from sglang.srt.layers.radix_attention import RadixAttention

    init = RadixAttention.__init__

    def with_scales(layer, *args, **kwargs) -> None:
        init(layer, *args, **kwargs)
        layer.k_scale, layer.v_scale = (torch.nn.Parameter(torch.tensor(scale), requires_grad=False) for scale in scales)
        layer.k_scale_float, layer.v_scale_float = scales

    RadixAttention.__init__ = with_scales


def serve_windows() -> None:
    """Have stock SGLang attend on a CPU to its two pools of such models. Its own attention there knows no learned sinks, and reads the pool of
    window layers by an index of the other. gpt-oss's experts need not wait for a compiler."""
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS

    from sglang_freekv.cpu_attention import WindowedAttention
    from sglang_freekv.scheduler_patch import SCHEDULER_ON_CPU, registry

    registry.apply(patch for patch in SCHEDULER_ON_CPU if patch.hook.startswith("compiled:"))
    ATTENTION_BACKENDS["torch_native"] = WindowedAttention


def sums_of_squares(*parts: torch.Tensor) -> torch.Tensor:
    """``[len(parts) * B]`` float32 of parts ``[B, D]``: MiniMax-M2's Triton kernel, which no CPU runs."""
    return torch.cat([part.float().square().sum(1) for part in parts])


def apply_norms(first, second, first_weight, second_weight, sums: torch.Tensor, ranks: int, eps: float) -> list[torch.Tensor]:
    """Both parts ``[B, D]``, each over its root mean square and times its weight ``[D]``."""
    norms = zip((first, second), (first_weight, second_weight), sums.chunk(2))
    return [part * torch.rsqrt(each / part.shape[1] / ranks + eps)[:, None] * weight for part, weight, each in norms]


def main(file: Path) -> None:
    import sglang.srt.entrypoints.engine
    import sglang.srt.managers.scheduler  # noqa: F401, so that every fork has it
    from sglang.srt.models import minimax_m2
    from sglang.srt.models.registry import ModelRegistry  # noqa: F401, with all models

    minimax_m2.rms_sumsq_serial, minimax_m2.rms_apply_serial = sums_of_squares, apply_norms
    multiprocessing.set_start_method("fork", force=True)
    multiprocessing.set_start_method = lambda *args, **kwargs: None  # SGLang would spawn its processes, which import everything anew
    gc.collect()
    gc.freeze()  # else each engine's own collection would copy all that the forks share
    for name, job in json.loads(file.read_text()).items():
        if (child := os.fork()) == 0:
            with (file.parent / f"{name}.log").open("w") as log:
                os.dup2(log.fileno(), 1)
                os.dup2(log.fileno(), 2)
            os.setsid()
            serve(job, file.parent / f"{name}.json")
            os._exit(0)
        os.waitpid(child, 0)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
