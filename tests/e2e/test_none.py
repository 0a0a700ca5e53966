"""``--kv-retrieval none``, the default, leaves SGLang as it is: the same tokens, pools and decisions as without the plugin."""

from __future__ import annotations

import re

import numpy as np

from benchmarks.needle import tasks
from serving import STOCK

VOLATILE = {"port", "nccl_port", "startup_time", "internal_states", "random_seed", "instance_id"}
VOLATILE |= {"launch_command"}  # which has the port
VOLATILE |= {"mem_fraction_static"}  # on a CPU a share of the memory that the machine shows, and a virtual one may grow
DECISIONS = re.compile(r"KV Cache is allocated|max_total_num_tokens=|Tree cache initialized|Disable|cuda graph|Memory pool end")


def decisions(server) -> list[str]:
    """What stock SGLang's log says that it decided, without times and memory readings."""
    lines = [line.split("] ", 1)[-1] for line in server.log.read_text().splitlines() if DECISIONS.search(line)]
    return [re.sub(r"(avail|mem)\w*[ =][\d.]+ GB|\d+\.\d+ GB", "", line) for line in lines if not line.startswith("server_args=")]


def test_none_is_stock(serve, fleet):
    flags = STOCK | {"--max-total-tokens": 131072}
    rng = np.random.default_rng(2)
    prompts = [tasks.make_document(rng, int(length), needle_count=2).token_ids for length in (100, 333, 1200)]
    with serve(flags, env={"SGLANG_PLUGINS": "__none__"}) as (without,):
        expected = [without.generate(prompt, 24)["output_ids"] for prompt in prompts]
        fleet.stock.flush()
        assert [fleet.stock.generate(prompt, 24)["output_ids"] for prompt in prompts] == expected
        infos = [server.get("/server_info") for server in (without, fleet.stock)]
        stock, none = ({key: value for key, value in info.items() if key not in VOLATILE} for info in infos)
        assert none == stock
        assert decisions(fleet.stock) == decisions(without) != []
    hooked = re.findall(r"Applied \d+ hook\(s\) to (\S+)", fleet.stock.log.read_text())
    assert not [target for target in hooked if "configure_scheduler_process" not in target and "server_args" not in target]
