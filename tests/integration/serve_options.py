"""What becomes of every option of `vllm serve` beside `--quantization ndp`: names as vLLM's configuration has them.

    WORKS        as vLLM's own, or as is said
    REFUSED      at the start, in one sentence
    NOT_OURS     vLLM acts on it as ever, and the plugin takes no part

test_integration_flags.py holds the three together equal to what vLLM offers, so that an option of a
new version is answered before that version is supported; test_integration_options.py gives each option on a command
line, with the plugin and without. Imports nothing of vLLM.
"""

WORKS = {
    "as for every model": (
        "model quantization served_model_name host port max_model_len max_num_seqs kv_cache_memory_bytes "
        "enforce_eager chat_template enable_chunked_prefill max_num_batched_tokens long_prefill_token_threshold "
        "long_prefill_token_threshold_adaptive enable_prefix_caching prefix_caching_hash_algo block_size "
        "tensor_parallel_size pipeline_parallel_size"
    ),
    "the plugin's settings, in one JSON or all of them dotted, not both": "additional_config",
    "`vllm_ndp.integration.serving.routes.NdpRoutes`: serving.md": "middleware",
    "`ForcedTokens` scores given tokens by decode (howto.md)": "logits_processors",
    "guards our paths as well": "api_key",
    "30 or more: everything ends in order; 0: the process tree is killed": "shutdown_timeout",
    "without stats vLLM's `/metrics` has no numbers of ours either; reports and status do": "disable_log_stats",
    "float32 and bfloat16; float16 is accepted and was not run": "dtype",
    "torch.compile stays on; CUDA graphs are off, and full ones refused": "compilation_config optimization_level",
    "preemption and recompute": "num_gpu_blocks_override",
    "`ngram`, `draft_model`, `eagle`, `eagle3`, `medusa`, `mtp`; `suffix` was not run": (
        "speculative_config spec_method spec_model spec_tokens"
    ),
    "adapters of attention and other layers; of experts they are refused": (
        "enable_lora lora_target_modules max_loras max_lora_rank max_cpu_loras lora_dtype lora_modules"
    ),
    "one that only saves KV (`kv_producer`), by vLLM's MultiConnector beside ours; one that loads is refused": (
        "kv_transfer_config"
    ),
    "`mp`, `uni`, `ray`": "distributed_executor_backend",
    "with tensor parallelism; over data-parallel ranks refused": "enable_expert_parallel",
    "engines of their own": (
        "data_parallel_size data_parallel_rank data_parallel_size_local data_parallel_address "
        "data_parallel_rpc_port data_parallel_backend"
    ),
}

REFUSED = {
    "but for `auto`, `hf`, `safetensors`, `fastsafetensors`, `instanttensor`: experts are in safetensors": (
        "load_format model_loader_extra_config"
    ),
    "experts are read from the model's directory": "model_weights",
    "vLLM would quantize what it loads, and experts it does not": "quantization_config",
    "where it changes experts (number, size, per token, activation); other values are vLLM's": "hf_overrides",
    "pool, replicas and device keep the checkpoint's weights": "weight_transfer_config",
    "KV comes back without its routing": "kv_offloading_size kv_offloading_backend",
    "vLLM would move the hot slots: lower `hot_experts` instead": (
        "cpu_offload_gb cpu_offload_params offload_backend offload_group_size offload_num_in_group "
        "offload_prefetch_step offload_params"
    ),
    "experts run in our kernels": "moe_backend",
    "other than `linear`": "expert_placement_strategy",
    "not served": (
        "enable_elastic_ep elastic_ep_max_dp_size enable_eplb eplb_config enable_dbo ubatch_size "
        "dbo_decode_token_threshold dbo_prefill_token_threshold prefill_context_parallel_size "
        "decode_context_parallel_size dcp_comm_backend dcp_q_replicate dcp_kv_cache_interleave_size "
        "cp_kv_cache_interleave_size"
    ),
    "not tried on a GPU, and vLLM's CPU build has none": (
        "enable_sleep_mode sleep_mode_offload_cudagraph sleep_preserve_parameter_names enable_cumem_allocator"
    ),
    "pooling, which never decodes": "runner convert pooler_config",
    "unless it is made of ours": "worker_cls",
    "adapters of experts": "fully_sharded_loras enable_mixed_moe_lora_format enable_moe_shared_loras",
}

NOT_OURS = {
    "the HTTP server": (
        "chat_template_content_format trust_request_chat_template trust_request_mm_kwargs "
        "default_chat_template_kwargs response_role return_tokens_as_token_ids enable_auto_tool_choice "
        "exclude_tools_when_tool_choice_none tool_call_parser tool_parser_plugin tool_strict_level tool_server "
        "max_log_len enable_prompt_tokens_details enable_per_request_metrics enable_server_load_tracking "
        "enable_force_include_usage sse_keep_alive_interval enable_tokenizer_info_endpoint enable_log_outputs "
        "enable_log_deltas cohere_is_reasoning_model cohere_format anthropic_disabled_thinking_effort "
        "log_error_stack tokens_only enable_scale_out fingerprint_mode fingerprint_value grpc_port "
        "data_parallel_supervisor_port dp_supervisor_probe_interval_s dp_supervisor_probe_timeout_s "
        "dp_supervisor_probe_failure_threshold uds uvicorn_log_level disable_uvicorn_access_log "
        "disable_access_log_for_endpoints allow_credentials allowed_origins allowed_methods allowed_headers "
        "ssl_keyfile ssl_certfile ssl_ca_certs enable_ssl_refresh ssl_cert_reqs ssl_ciphers root_path "
        "enable_request_id_headers disable_fastapi_docs h11_max_incomplete_event_size h11_max_header_count "
        "enable_offline_docs enable_flash_late_interaction enable_log_requests"
    ),
    "logs, metrics and profiles": (
        "aggregate_engine_logging show_hidden_metrics_for_version collect_detailed_traces otlp_traces_endpoint "
        "per_request_spec_decode_metrics kv_cache_metrics kv_cache_metrics_sample custom_histogram_buckets "
        "cudagraph_metrics enable_layerwise_nvtx_tracing enable_mfu_metrics enable_logging_iteration_details "
        "jit_monitor_mode jit_monitor_verbose enable_mm_processor_stats profiler_config logging_config log_level "
        "log_config_file fail_on_environ_validation use_tqdm_on_load"
    ),
    "tokenizer, prompts and where files come from": (
        "tokenizer tokenizer_mode tokenizer_revision skip_tokenizer_init hf_config_path config_format "
        "trust_remote_code revision code_revision hf_token download_dir ignore_patterns safetensors_load_strategy "
        "safetensors_prefetch_num_threads safetensors_prefetch_block_size pt_load_map_location "
        "allow_deprecated_quantization max_parallel_loading_workers enable_prompt_embeds generation_config "
        "override_generation_config io_processor_plugin renderer_num_workers model_class_overrides model_impl"
    ),
    "sampling and what answers hold": (
        "seed max_logprobs logprobs_mode use_fp64_gumbel structured_outputs_config reasoning_parser "
        "reasoning_parser_plugin reasoning_config return_sampling_mask watermark_config stream_interval "
        "enable_return_routed_experts aux_output_config enable_trace_replay enable_batch_sharded_sampling"
    ),
    "the scheduler": (
        "max_num_scheduled_tokens max_num_active_seqs max_num_queued_reqs max_num_queued_tokens scheduling_policy "
        "scheduler_cls async_scheduling scheduler_reserve_full_isl prefill_schedule_interval watermark "
        "disable_chunked_mm_input performance_mode"
    ),
    "attention and its KV cache": (
        "kv_cache_dtype kv_cache_dtype_skip_layers gpu_memory_utilization disable_sliding_window "
        "disable_cascade_attn attention_backend attention_config disable_hybrid_kv_cache_manager "
        "prefix_cache_retention_interval prefix_match_unit kv_sharing_fast_prefill swa_bounded_replay "
        "kv_events_config sparse_indexer_topk_backend engram_config"
    ),
    "kernels of other layers, graphs and devices": (
        "linear_backend kernel_config enable_flashinfer_autotune ir_op_priority cudagraph_capture_sizes "
        "max_cudagraph_capture_size device_ids disable_custom_all_reduce enable_shm_tensor_arena "
        "gdn_prefill_backend kda_prefill_backend kda_decode_backend all2all_backend enable_hc_sp "
        "enable_ep_weight_filter enable_nccl_comm_suspend"
    ),
    "state-space and diffusion models": (
        "mamba_config mamba_cache_dtype mamba_ssm_cache_dtype mamba_block_size mamba_cache_mode "
        "enable_mamba_shared_prefix_checkpoint replayssm_buffer_len use_replayssm mamba_backend "
        "mamba_ssu_algorithm enable_mamba_cache_stochastic_rounding mamba_cache_philox_rounds diffusion_config"
    ),
    "pictures, sound and video": (
        "allowed_local_media_path allowed_media_domains language_model_only limit_mm_per_prompt enable_mm_embeds "
        "interleave_mm_strings media_io_kwargs mm_processor_kwargs mm_processor_cache_gb mm_processor_cache_type "
        "mm_hasher_algorithm mm_shm_cache_max_object_size_mb mm_encoder_only mm_encoder_tp_mode "
        "mm_encoder_attn_backend mm_encoder_attn_dtype mm_encoder_fp8_scale_path mm_encoder_fp8_scale_save_path "
        "mm_encoder_fp8_scale_save_margin skip_mm_profiling video_pruning_rate video_pruning_method mm_tensor_ipc "
        "mm_processor_device mm_ipc_gpu_memory_gb mm_device_do_normalize ec_transfer_config ec_manager_config "
        "default_mm_loras enable_tower_connector_lora"
    ),
    "adapters' details": "specialize_active_lora max_lora_cls_labels",
    "several machines and processes": (
        "master_addr master_port nnodes node_rank distributed_timeout_seconds cpu_distributed_timeout_seconds "
        "numa_bind numa_bind_nodes numa_bind_cpus data_parallel_start_rank data_parallel_hybrid_lb "
        "data_parallel_external_lb data_parallel_multi_port_external_lb dp_sync_interval "
        "disable_nccl_for_dp_synchronization ray_workers_use_nsight worker_extension_cls fault_tolerance_config "
        "enable_fault_tolerance _api_process_count _api_process_rank"
    ),
}
