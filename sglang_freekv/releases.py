# SPDX-License-Identifier: Apache-2.0
"""SGLang's releases: which have been tested, and where they differ.

No other file compares releases or asks whether a symbol is there. A hook whose target or parameters differ says so in the table of patches.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import NamedTuple

from packaging.version import Version

TESTED = ("0.5.17", "0.5.23")  # launch/environments.sh reads this line
NEWEST = TESTED[-1]
INSTALL = f"`pip install sglang=={NEWEST}`"


class Difference(NamedTuple):
    """What SGLang does otherwise from one release on.

    Args:
        since: the first release that has it.
        symbol: dotted path of what is new since then, by which a release is told to have it; its last part may be a parameter.
        change: what is otherwise.
    """

    since: str
    symbol: str
    change: str


# fmt: off
DIFFERENCES = {
    "request KV": Difference(
        "0.5.19", "sglang.srt.managers.schedule_batch.ReqKvInfo.holds_kv",
        "a request's row is req.kv.req_pool_idx; req.kv stays when the row is given back, and req.kv.holds_kv tells",
    ),
    "settings apart": Difference(
        "0.5.20", "sglang.srt.server_args._rebuild_server_args",
        "ServerArgs is a msgspec Struct that keeps what was typed; settings are resolved later, and read through a view",
    ),
    "prefill budget": Difference(
        "0.5.21", "sglang.srt.managers.schedule_policy.PrefillAdder.memory_budget",
        "memory_budget.total_offset takes the place of the adder's rem_total_token_offset",
    ),
    "checkpoint": Difference(
        "0.5.22", "sglang.srt.mem_cache.common.release_kv_cache.checkpoint",
        "release_kv_cache is told whether the tree keeps the pages by checkpoint=, which has no default, instead of is_insert=",
    ),
    "tree paths": Difference(
        "0.5.22", "sglang.srt.mem_cache.unified_cache.unified_tree_core_interface.UnifiedTreeCoreInterface.collect_path_info",
        "the radix tree is UnifiedRadixCache, and its core tells the nodes of a path, by which pages are forgotten there",
    ),
    "extend end": Difference(
        "0.5.22", "sglang.srt.managers.schedule_batch.Req.extend_end",
        "req.extend_end takes the place of req.extend_range.end",
    ),
    "worker app": Difference(
        "0.5.23", "sglang.srt.environ.Envs.SGLANG_HTTP_SERVER_APP_PATH",
        "the HTTP app of tokenizer workers has a name that can be set, so they can be hooked",
    ),
}
# fmt: on


def _installed() -> Version:
    try:
        return Version(version("sglang"))
    except PackageNotFoundError:  # the doctor works without SGLang, and tells that it is missing
        return Version("0")


INSTALLED = _installed()


def has(name: str) -> bool:
    """Whether the installed SGLang has a difference of :data:`DIFFERENCES`."""
    return is_since(DIFFERENCES[name].since)


def is_since(release: str) -> bool:
    """Whether the installed SGLang is this release or a later one."""
    return INSTALLED.release >= Version(release).release


def is_tested() -> bool:
    """Whether the installed SGLang is one of :data:`TESTED`, for whichever CUDA it was built."""
    return INSTALLED.public in TESTED
