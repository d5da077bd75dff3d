"""Two thousand random requests, some of them aborted: every one is answered, and nothing is left of them."""

from __future__ import annotations

import gc
import random
from pathlib import Path

import pytest

from flexdecode.generation.request import Request
from tests.generation.running import engine, idle_pages, model, params
from tests.oracles import ids

REQUESTS = 2000


def resident() -> int:
    """Bytes of memory that this process has in use."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.slow
def test_two_thousand_requests_leave_nothing_behind(tmp_path: Path) -> None:
    layers = {"layer_types": ["sliding_attention", "full_attention"], "num_hidden_layers": 2}
    decoder = model(tmp_path, "gemma3_text", hidden_size=32, intermediate_size=32, head_dim=8, **layers)
    e = engine(decoder, kv_tokens=480, page=4, max_running=32, prefill_chunk=256)
    chance, open_, counts = random.Random(0), [], {"length": 0, "abort": 0}
    names, memory, preemptions = [], [], 0
    added = 0
    while added < REQUESTS or e.busy:
        while added < REQUESTS and len(open_) < 100:
            # Some begin alike; one in twenty asks for several answers.
            prompt = [*ids(chance.randrange(16), seed=chance.randrange(6)), *ids(chance.randrange(1, 12), seed=added)]
            way = chance.choice([{}, {"temperature": 1.0, "seed": added}])
            n = chance.choice([1] * 19 + [3])
            own = [params(chance.randrange(1, 40), **way).choice(i) for i in range(n)]
            open_ += e.add_choices(prompt, own, (), chance.choice([0, 0, 0, 1]))
            added += n
        e.step()
        if chance.random() < 0.05:
            e.abort(chance.choice(open_))
        ended = [r for r in open_ if r.finish_reason is not None]
        for request in ended:
            check(request)
            assert request.finish_reason is not None
            counts[request.finish_reason] += 1
            preemptions += request.preemptions
        open_ = [r for r in open_ if r.finish_reason is None]
        if ended and sum(counts.values()) % 20 == 0:
            gc.collect()
            names.append(len(e.cache._prefixes))
            memory.append(resident())
    assert sum(counts.values()) == added
    assert counts["abort"] > 50
    assert preemptions > 50
    assert idle_pages(e) == [0, 0]
    # A name lives with its page, in either group, or as the beginning of one that does.
    assert max(names) <= 3 * 120
    third = len(memory) // 3
    assert max(memory[-third:]) - max(memory[:third]) < 16 << 20


def check(request: Request) -> None:
    assert request.error is None
    assert request.finish_reason == "abort" or len(request.output_ids) == request.max_tokens
