"""How vLLM 0.32 calls each hook: how many arguments by position, and which by name. Read in v1/core/sched/scheduler.py,
v1/engine/core.py, v1/worker/gpu/kv_connector.py, v1/worker/kv_connector_model_runner_mixin.py, model_executor/layers/attention/
kv_transfer_utils.py, config/vllm.py and distributed/kv_transfer/kv_connector/v1/metrics.py.
"""

from __future__ import annotations

# Hook -> (arguments by position, arguments by name).
Calls = dict[str, tuple[int, tuple[str, ...]]]

OF_THE_CLASS: Calls = {
    "get_required_kvcache_layout": (1, ()),
    "requires_piecewise_for_cudagraph": (1, ()),
    "build_kv_connector_stats": (1, ()),
    "build_prom_metrics": (4, ()),
}
OF_THE_SCHEDULER_HALF: Calls = {
    "bind_kv_cache_manager": (1, ()),
    "bind_gpu_block_pool": (1, ()),
    "on_new_request": (1, ()),
    "get_num_new_matched_tokens": (2, ()),
    "get_loaded_kv_cache_group_ids": (1, ()),
    "update_state_after_alloc": (3, ()),
    "get_external_cache_hit_sources": (2, ()),
    "build_connector_meta": (1, ()),
    "update_connector_output": (1, ()),
    "request_finished": (2, ()),
    "register_finished_partial_tail": (3, ()),
    "take_events": (0, ()),
    "has_pending_block_frees": (0, ()),
    "has_pending_push_work": (0, ()),
    "get_finished_count": (0, ()),
    "set_xfer_handshake_metadata": (1, ()),
    "set_xfer_handshake_metadata_pp_aware": (1, ()),
    "reset_cache": (0, ()),
}
OF_THE_WORKER_HALF: Calls = {
    "get_mem_pool_context": (0, ()),
    "register_kv_caches": (1, ()),
    "set_host_xfer_buffer_ops": (1, ()),
    "get_handshake_metadata": (0, ()),
    "handle_preemptions": (1, ()),
    "bind_connector_metadata": (1, ()),
    "start_load_kv": (
        1,
        ("scheduler_output", "request_state_indices", "request_ids", "num_tokens", "attn_metadata"),
    ),
    "wait_for_layer_load": (1, ()),
    "save_kv_layer": (3, ()),
    "finish_forward": (0, ()),
    "wait_for_save": (0, ()),
    "get_finished": (1, ()),
    "get_transfer_results": (1, ()),
    "get_block_ids_with_load_errors": (0, ()),
    "get_kv_connector_stats": (0, ()),
    "get_kv_connector_kv_cache_events": (0, ()),
    "build_connector_worker_meta": (0, ()),
    "clear_connector_metadata": (0, ()),
    "has_connector_metadata": (0, ()),
    "reset_capture_state": (0, ()),
    "shutdown": (0, ()),
}
WITH_GROUPS: Calls = {"request_finished_all_groups": (2, ())}  # of classes that inherit SupportsHMA
