"""Loads of the fake connector on a live engine: they bring the words that the subject's would bring."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from pytest_kvconform.rigs.scheduler.live.engine import LiveEngine


def write_fake_loads(engine: LiveEngine) -> None:
    """Write, from now on, what loads of the fake connector bring that do not fail. The engine compares it
    when the request runs, as what the subject loads.
    """
    from pytest_kvconform.rigs.vllm_setup.stand_ins.fake_connector import LOADED, FakeMetadata

    side, work = engine.side, engine.side.worker
    assert work is not None

    def work_and_load(output: Any) -> Any:
        for metadata in output.kv_connector_metadata.metadata:
            if isinstance(metadata, FakeMetadata) and metadata.ends == LOADED:
                for id in metadata.loads:
                    _write(engine, id)
        return work(output)

    side.worker = work_and_load


def _write(engine: LiveEngine, id: str) -> None:
    """Write the tokens of a load of attention layers, as the engine that computed them does."""
    tokens, side = np.arange(*engine.loads[id]), engine.side
    for group, table in enumerate(side.blocks(id)):
        blocks = np.array(table)[tokens // side.group_sizes[group]]
        for name in side.kv_config.kv_cache_groups[group].layer_names:
            if name in engine.half.layers:
                owner, by = engine.owners[id], engine.computed_by[id]
                engine.memory.write(name, blocks, tokens, owner, by)
