"""Trial switches, step by step: python benchmarks/trial_steps.py OUT SECONDS HOST_TOKENS CASE:C[,..] TRIAL[+TRIAL..] ..."""
import json
import math
import os
import sys
import time
import traceback
from pathlib import Path

import bench_step
import torch
from bench_step import CASES, DEVICE, DTYPE, HEAD_DIM, KV_HEADS, LAYERS, QUERY_HEADS, SHAPE, VARIANTS, Step, _tell
from paper.decoder import Decoder
from replay import Controls
from replay_load import Load
from sglang_freekv.config import FreeKVConfig
from sglang_freekv.digests import digests_of
from sglang_freekv.memory_pool.sizing import KVShape
from sglang_freekv.memory_pool.store import Store
from sglang_freekv.memory_pool.transfer import CudaStream

out, seconds, host_tokens, cases, *trials = sys.argv[1:]
out, begin = Path(out), time.time()
out.mkdir(parents=True, exist_ok=True)
model, config = Decoder(SHAPE, DTYPE, DEVICE), FreeKVConfig()
digest = digests_of(config).shape(HEAD_DIM, DTYPE.itemsize)
shape = KVShape(LAYERS, 0, KV_HEADS, QUERY_HEADS, HEAD_DIM, math.prod(digest), DTYPE.itemsize)
store = Store.build(config, shape, int(host_tokens) - config.page_size, 16, config.page_size, digest, DTYPE, DEVICE, CudaStream(DEVICE))
for digests in store.digests.layers:
    digests.normal_()
print(f"up {time.time() - begin:.0f} s", flush=True)
found = {}
for case in cases.split(","):
    if case != cases.split(",")[0]:  # the fastest of the first one, and what there was
        medians = {trial: min(ms for ms, _ in found[f"{first} {trial}"]) for trial in trials if found.get(f"{first} {trial}", "failed") != "failed"}
        trials = ["base", *[trial for trial in sorted(medians, key=medians.get) if trial != "base" and "/" not in trial][:4]]
    else:
        first = case
    for turn in range(3 if case == first else 2):
        name, corrected = case.split(":")
        context, batch = CASES[name]
        for trial in trials:
            if time.time() - begin > float(seconds):
                break
            label = f"{case} {trial}"
            if found.get(label) == "failed":
                continue
            flags, _, variant = trial.partition("/")
            os.environ["TRIAL"] = "" if flags == "base" else flags.replace("+", ",")
            try:
                controls = Controls(DEVICE)
                candidates = context // config.page_size - config.pages.sink - config.pages.window
                controls.set(Load(float(corrected), 0.21, candidates, config.pages.selected))
                step = Step(config, model, store, controls, batch, context, 131_040, VARIANTS[variant or "freekv"])
                times = sorted(step.time(50))
                counts = step.retrieval.row_counts(step.batch.rows).sum(0).tolist()
                found.setdefault(label, []).append((times[len(times) // 2] * 1e3, counts))
                if turn == 0 and os.environ.get("PROFILE") and name == "32k-b8" and corrected == "0.13":
                    step.profile(out / f"profile-{trial.replace('/', '-')}.json")
            except Exception as error:
                traceback.print_exc(limit=3)
                found[label] = "failed"
                print(label, "failed", repr(error)[:300], flush=True)
                torch.cuda.synchronize()
            step = None
            print(f"{time.time() - begin:.0f} s {label}: {found[label][-1] if found[label] != 'failed' else ''}", flush=True)
            (out / f"trial-{host_tokens}.json").write_text(json.dumps(found))
for label, each in found.items():
    print(f"{label:50}", each if each == "failed" else " ".join(f"{ms:.3f}" for ms, _ in each), flush=True)
