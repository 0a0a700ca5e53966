# SPDX-License-Identifier: Apache-2.0
"""Every SGLang symbol that this package hooks, with its reason.

| table | attached when | in the process of |
|---|---|---|
| ``FRONT`` | SGLang loads its plugins | any |
| ``LAUNCHER`` | an engine with ``--kv-retrieval`` starts | the HTTP server or ``Engine``, and every tokenizer worker |
| ``SERVER`` | the same | the HTTP server |
| ``SCHEDULER`` | the same | every scheduler |
| ``LAUNCHER_ON_CPU``, ``SCHEDULER_ON_CPU`` | the same, with ``--device cpu`` | as above |

``FRONT`` reads arguments, and ``OPTIONS`` is the part of it that takes FreeKV's. With ``--kv-retrieval none`` its hooks change nothing.
A hook's docstring begins with its kind: BEFORE, AFTER or AROUND the function of SGLang, or REPLACE for its substitute. ``due`` names what
calls a hook in every engine. The start of a scheduler passes all of START, or it ends; so do its first step (STEP), its first sampled token
(SAMPLE) and its first decode step (DECODE). The first request passes all of REQUEST in the launcher, or it fails, and the start with it.
A request with a text and one by HTTP have hooks of their own.
"""

from __future__ import annotations

from sglang.srt.plugins.hook_registry import HookType

from sglang_freekv.scheduler_patch.registry import ATTRIBUTE, DECODE, HTTP_REQUEST, REQUEST, SAMPLE, START, STEP, TEXT_REQUEST, Patch

PROCESS_MESSAGES = ("self request is_multimodal", "self request is_multimodal output_constrained")

BEFORE, AFTER, AROUND, REPLACE = HookType.BEFORE, HookType.AFTER, HookType.AROUND, HookType.REPLACE

# fmt: off
OPTIONS = (
    Patch(
        "sglang.srt.server_args.ServerArgs.add_cli_args", "parser", AFTER, "arguments:add_cli_args",
        "the flags, in --help and in --config files",
    ),
    Patch(
        "sglang.srt.server_args.ServerArgs.from_cli_args", "args", AROUND, "arguments:from_cli_args",
        "flags go from the command line to ServerArgs; a refusal is the last line printed",
    ),
    Patch(
        "sglang.srt.server_args.ServerArgs.__init__", None, AROUND, "arguments:init",
        "flags are keyword arguments of Engine too; defaults and refusals are decided here, and the config travels to the schedulers",
        until="0.5.20",
    ),
    Patch(
        "sglang.srt.entrypoints.engine.Engine.server_args_class", None, ATTRIBUTE, "arguments:make_for_engine",
        "the same for keyword arguments of Engine, which loads plugins when it is being made already",
        since="0.5.20",
    ),
)

FRONT = OPTIONS + (
    Patch(
        "sglang.srt.server_args.prepare_server_args", "argv", AFTER, "ports:try_ports",
        "SGLang binds its port after the model has loaded, and dies there if the port is taken",
    ),
    Patch(
        "sglang.srt.entrypoints.engine.Engine._launch_subprocesses",
        (
            "server_args init_tokenizer_manager_func run_scheduler_process_func run_detokenizer_process_func port_args",
            "server_args init_tokenizer_manager_func run_scheduler_process_func run_detokenizer_process_func port_args placement_group",
        ),
        AROUND, "activation:in_launcher",
        "attaches LAUNCHER before any process starts; the engine is not ready unless its scheduler has been hooked",
    ),
    Patch(
        "sglang.srt.managers.scheduler.configure_scheduler_process",
        (
            "server_args gpu_id tp_rank attn_cp_rank moe_dp_rank moe_ep_rank pp_rank dp_rank "
            "display_tp_rank display_dp_rank display_moe_ep_rank",
            "server_args gpu_id display_tp_rank display_dp_rank display_moe_ep_rank",
        ),
        BEFORE, "activation:in_scheduler",
        "attaches SCHEDULER before the scheduler is built",
    ),
    Patch(
        "sglang.srt.arg_groups.mamba_hook._platform_supports_mamba_cache_extra_buffer", "", AROUND, "linear_attention:keeps_states",
        "SGLang asserts that a CPU keeps no states in the prefix cache, where it has no kernels for it",
        since="0.5.22",
    ),
    Patch(
        "sglang.srt.arg_groups.model_hook.attention_backends_of", "cfg", ATTRIBUTE, "backend_names:of_settings",
        "SGLang asserts that gpt-oss has an attention backend with windows and learned sinks, by a list of names",
        since="0.5.20",
    ),
    Patch(
        "sglang.srt.server_args.ServerArgs._resolved_attention_backends", "self", AROUND, "backend_names:of_server_args",
        "the same", until="0.5.20",
    ),
)

LAUNCHER = (
    Patch(
        "sglang.srt.managers.tokenizer_manager.ReqState.__init__", None, AFTER, "counts:replace_accumulated",
        "meta_info['freekv'] is a running total, but SGLang appends one item of custom info per token",
        due=REQUEST,
    ),
    Patch(
        "sglang.srt.entrypoints.openai.serving_base.OpenAIServingBase.handle_request", "self request raw_request",
        AROUND, "openai_answers:handle_request",
        "SGLang returns meta_info in whole chat completions only, but not in streams or completions",
    ),
    Patch(
        "sglang.srt.managers.tokenizer_manager.TokenizerManager.generate_request", "self obj request",
        AROUND, "openai_answers:generate_request",
        "meta_info is seen here, and kept for the answer to a request that asks for it",
        due=REQUEST,
    ),
    Patch(
        "sglang.srt.managers.tokenizer_manager.TokenizerManager.generate_request", "self obj request", BEFORE, "fields:refuse_unanswered",
        "a busy scheduler drops a request that is named like a health check, and its client waits for ever",
        due=REQUEST,
    ),
    Patch(
        "sglang.srt.managers.io_struct.GenerateReqInput.normalize_batch_and_arguments", "self", AROUND, "fields:normalize",
        "a field of a wrong type or width, or one reserved for SGLang, is a client's mistake and must not end the server",
        due=REQUEST,
    ),
    Patch(
        "sglang.srt.managers.io_struct.EmbeddingReqInput.normalize_batch_and_arguments", "self", AROUND, "fields:normalize",
        "the same for requests for embeddings",
    ),
    Patch(
        "sglang.srt.managers.tokenizer_manager.TokenizerManager._create_tokenized_object",
        "self obj input_text input_ids input_embeds mm_inputs token_type_ids", AROUND, "fields:tokenize",
        "the same for fields that are checked against the model's config; input embeddings are made to share a batch",
        due=REQUEST,
    ),
    Patch(
        "sglang.srt.managers.tokenizer_manager.TokenizerManager._tokenize_one_request", "self obj",
        AROUND, "mistakes:awaited_as_clients_mistake",
        "an input that cannot be tokenized is a client's mistake",
        due=TEXT_REQUEST,
    ),
    *(
        Patch(
            f"sglang.srt.entrypoints.openai.{module}._convert_to_internal_request", "self request raw_request",
            AROUND, "mistakes:as_clients_mistake",
            "a field of the OpenAI API that cannot be read is a client's mistake",
        )
        for module in ("serving_chat.OpenAIServingChat", "serving_completions.OpenAIServingCompletion")
    ),
    *(
        Patch(
            f"sglang.srt.{target}", parameters, AROUND, "mistakes:as_clients_mistake",
            "messages and texts of every API pass here, and one that cannot be read is a client's mistake",
        )
        for target, parameters in (
            ("entrypoints.openai.serving_chat.OpenAIServingChat._process_messages", PROCESS_MESSAGES),
            (
                "function_call.function_call_parser.FunctionCallParser.parse_non_stream",
                ("self full_text", "self full_text preserve_incomplete"),
            ),
        )
    ),
    *(
        Patch(f"sglang.srt.entrypoints.{target}", parameters, AROUND, "mistakes:awaited_as_clients_mistake", "the same for other APIs")
        for target, parameters in (
            (
                "openai.serving_responses.OpenAIServingResponses._make_request",
                ("self request prev_response tokenizer", "self request prev_response tokenizer tool_adapter"),
            ),
            ("ollama.serving.OllamaServing.handle_chat", "self request raw_request"),
        )
    ),
    *(
        Patch(
            f"sglang.srt.entrypoints.{target}", parameters, BEFORE, "mistakes:refuse_no_messages",
            "chat templates fail without a message, and do not say why",
        )
        for target, parameters in (
            ("openai.serving_chat.OpenAIServingChat._process_messages", PROCESS_MESSAGES),
            ("ollama.serving.OllamaServing.handle_chat", "self request raw_request"),
        )
    ),
    Patch(
        "sglang.srt.managers.tokenizer_manager_score_mixin.TokenizerManagerScoreMixin.score_request",
        "self query items label_token_ids apply_softmax item_first embed_override_token_id query_embed_overrides "
        "item_embed_overrides request return_pooled_hidden_states",
        BEFORE, "mistakes:refuse_no_labels",
        "a score of no token is answered with status 500; later releases refuse it",
        until="0.5.23",
    ),
    Patch(
        "fastapi.routing.run_endpoint_function", "dependant values is_coroutine", BEFORE, "mistakes:refuse_parameters",
        "/vertex_generate makes a request of any parameters; SGLang offers no function to hook before that",
        due=HTTP_REQUEST,
    ),
    Patch(
        "sglang.srt.entrypoints.anthropic.serving.AnthropicServing._error_response",
        "self status_code error_type message exception_name", AROUND, "mistakes:anthropic_error",
        "this API answers a client's mistake with status 500",
    ),
    Patch(
        "sglang.srt.entrypoints.openai.serving_tokenize.OpenAIServingDetokenize._handle_non_streaming_request",
        "self adapted_request request raw_request", BEFORE, "fields:refuse_unknown_tokens",
        "an id that overflows the tokenizer's numbers is answered with status 500",
    ),
    Patch(
        "sglang.srt.managers.tokenizer_control_mixin.TokenizerControlMixin.set_internal_state", "self obj",
        BEFORE, "controls:refuse_micro_batch",
        "SGLang's check of the range lets a NaN pass, and its scheduler then counts with it",
    ),
    Patch(
        "sglang.srt.managers.tokenizer_control_mixin.TokenizerControlMixin.slow_down", "self obj request",
        BEFORE, "controls:refuse_long_sleep",
        "the scheduler sleeps for as long as the request says, and a time that is not a number ends it",
    ),
    Patch(
        "sglang.srt.managers.tokenizer_manager.TokenizerManager.configure_logging", "self obj", BEFORE, "controls:refuse_log_level",
        "SGLang keeps a level that it does not know, which then fails every request",
    ),
    Patch(
        "sglang.srt.managers.tokenizer_control_mixin.TokenizerControlMixin.release_memory_occupation", "self obj request",
        BEFORE, "controls:refuse_release",
        "it ends a busy scheduler, and does not release FreeKV's pools",
    ),
    Patch(
        "sglang.srt.managers.tokenizer_control_mixin.TokenizerControlMixin.resume_memory_occupation", "self obj request",
        BEFORE, "controls:refuse_release",
        "it ends the scheduler if nothing was released",
    ),
    Patch(
        "sglang.srt.multimodal.processors.base_processor.BaseMultimodalProcessor.clear_preprocess_cache", "self",
        AROUND, "images:clear_cache",
        "Mistral 3's processor wraps the one that has the cache, and a flush of the server is answered with status 500",
        since="0.5.23",
    ),
    *(
        Patch(
            f"sglang.srt.managers.tokenizer_control_mixin.TokenizerControlMixin.{name}", "self obj request",
            BEFORE, "controls:refuse_meeting",
            "the scheduler stands still until its peers come, which any client could ask for",
        )
        for name in (
            "init_weights_update_group", "update_weights_from_distributed",
            "init_weights_send_group_for_remote_instance", "send_weights_to_remote_instance",
        )
    ),
    *(
        Patch(
            f"sglang.srt.managers.tokenizer_control_mixin.TokenizerControlMixin.{verb}_expert_distribution_record", "self",
            BEFORE, "controls:refuse_recording",
            "it ends a scheduler that has no recorder",
        )
        for verb in ("start", "stop", "dump")
    ),
    Patch(
        "sglang.srt.managers.tokenizer_control_mixin.TokenizerControlMixin._execute_profile", "self req", AROUND, "controls:profile",
        "to start a second profile, or to stop one that does not run, is a client's mistake",
    ),
    Patch(
        "fastapi.routing.solve_dependencies", None, AROUND, "mistakes:awaited_as_clients_mistake",
        "a validator of SGLang expects a dict; on another type it raises an error that FastAPI answers with status 500",
        due=HTTP_REQUEST,
    ),
    Patch(
        "sglang.srt.managers.tokenizer_manager.TokenizerManager._wait_one_response", "self obj request", AROUND, "proof:wait_for_answer",
        "the first answer has passed all hooks that a request passes, or it is an error",
        due=REQUEST,
    ),
)

SERVER = (
    Patch(
        "sglang.srt.entrypoints.http_server._setup_and_run_http_server",
        "server_args tokenizer_manager template_manager port_args scheduler_infos subprocess_watchdog execute_warmup_func launch_callback",
        BEFORE, "mistakes:answer_client_mistakes",
        "a ValueError that an endpoint does not catch is a client's mistake",
        due=HTTP_REQUEST,
    ),
    Patch(
        "sglang.srt.entrypoints.http_server._setup_and_run_http_server",
        "server_args tokenizer_manager template_manager port_args scheduler_infos subprocess_watchdog execute_warmup_func launch_callback",
        AROUND, "proof:serve",
        "a server whose warm-up called no hook must not say that it is ready",
        due=HTTP_REQUEST,
    ),
)

LAUNCHER_ON_CPU = (
    Patch(
        "sglang.srt.function_call.utils._get_tool_schema", "tool", AFTER, "grammars:tool_schema",
        "llguidance follows the standard, by which a schema without a type allows any value; xgrammar takes it for an object",
    ),
)

SCHEDULER = (
    Patch(
        "sglang.srt.configs.model_config.ModelConfig._derive_hybrid_model", "self", BEFORE, "windows:keep_windows_apart",
        "Gemma 3 and OLMo 3 have window layers, and SGLang would keep all their tokens on the GPU",
        due=START,
    ),
    Patch(
        "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator._resolve_memory_pool_config",
        "self pre_model_load_memory", AROUND, "pools:resolve_memory_pool_config",
        "the host's memory bounds tokens, and the device's memory bounds rows",
        due=START,
    ),
    Patch(
        "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator._build_token_to_kv_pool",
        "self sizes is_dsa_model is_dsv4_model req_to_token_pool", AROUND, "pools:build_kv_pool",
        "the KV pool is FreeKVPool, with one device-cache row per request",
        due=START,
    ),
    Patch(
        "sglang.srt.models.utils.enable_fused_set_kv_buffer", "forward_batch", REPLACE, "pools:store_kv_apart",
        "some models write KV to the pool in the rotary embedding's kernel, but retrieval layers have no buffer there",
    ),
    Patch(
        "sglang.srt.managers.tp_worker.TpModelWorker.get_worker_info", "self", AFTER, "requests:longest_prompt",
        "a prompt that can never be admitted would block the queue, so it is refused",
        due=START,
    ),
    Patch(
        "sglang.srt.managers.scheduler.Scheduler.abort_request", "self recv_req", AROUND, "requests:let_in_who_stands_behind",
        "when a waiting request is aborted, the requests behind it may fit and must be looked at again",
    ),
    Patch(
        "sglang.srt.managers.scheduler.Scheduler._abort_on_waiting_timeout", "self", AROUND, "requests:let_in_who_stands_behind",
        "the same when a waiting request times out; later releases abort it",
        until="0.5.20", due=STEP,
    ),
    Patch(
        "sglang.srt.managers.schedule_policy.PrefillAdder.add_chunked_req", "self req", BEFORE, "prefill:whole_pages",
        "a chunk that is shortened because memory is full must still end at a page's end",
    ),
    Patch(
        "sglang.srt.managers.schedule_policy.PrefillAdder.add_one_req", "self req has_chunked_req truncation_align_size",
        AROUND, "prefill:bounded_contexts",
        "SGLang limits the new tokens of a batch only, but its prefixes must fit the staging buffer too",
        due=STEP,
    ),
    Patch(
        "sglang.srt.managers.scheduler.Scheduler.run_batch", "self batch pp_proxy_tensors", BEFORE, "prefill:mark_tables",
        "prefixes may be staged while a decode graph still runs, but not before their pages are known; the canary's faults are of who has "
        "them then",
        due=STEP,
    ),
    Patch(
        "sglang.srt.managers.schedule_batch.ScheduleBatch.release_req",
        ("self idx remaing_req_count server_args", "self idx remaing_req_count offload_kv"),
        REPLACE, "retraction:keep_pages",
        "a retracted request resumes from those of its host pages that were not evicted meanwhile",
    ),
    Patch(
        "sglang.srt.managers.schedule_batch.Req.reset_for_retract", "self", AFTER, "retraction:insert_again",
        "a request that was ended for changed KV and retracted would compute its first chunk for ever",
        until="0.5.20",
    ),
    Patch(
        "sglang.srt.managers.tp_worker.TpModelWorker.forward_batch_generation",
        (
            "self batch forward_batch pp_proxy_tensors is_verify skip_attn_backend_init capture_hidden_mode",
            "self batch forward_batch pp_proxy_tensors is_verify skip_attn_backend_init capture_hidden_mode return_kv_loc_plan",
        ),
        AFTER, "counts:attach",
        "a step's counts and the canary's faults leave the device with its logits",
        due=STEP,
    ),
    Patch(
        "sglang.srt.managers.utils.GenerationBatchResult.copy_to_cpu", "self return_logprob return_hidden_states",
        BEFORE, "counts:copy_to_cpu",
        "the overlap schedule copies results to the host on its copy stream; ours go along",
    ),
    Patch(
        "sglang.srt.managers.scheduler_components.batch_result_processor.SchedulerBatchResultProcessor._maybe_collect_customized_info",
        "self i req logits_output", AFTER, "counts:collect",
        "counts of each request, and the engine's totals",
    ),
    Patch(
        "sglang.srt.managers.scheduler_components.output_streamer.SchedulerOutputStreamer.get_cached_tokens_details",
        "self req", AFTER, "counts:cached_on_the_host",
        "SGLang reports the pages of a prefix hit as device memory, but they are in host memory",
    ),
    Patch(
        "sglang.srt.managers.scheduler.Scheduler.get_init_info", "self", AFTER, "observe:describe",
        "settings and sizes, at the top level of /server_info",
        due=START,
    ),
    Patch(
        "sglang.srt.managers.scheduler.Scheduler.get_internal_state", "self recv_req", AFTER, "observe:internal_state",
        "counts and use of the pools, in internal_states of /server_info",
    ),
    Patch(
        "sglang.srt.managers.scheduler.Scheduler.process_batch_result", "self batch result", AROUND, "observe:process_batch_result",
        "the canary's faults are acted on before a step's tokens leave; /metrics is updated after it",
        due=STEP,
    ),
    Patch(
        "sglang.srt.managers.scheduler.Scheduler.on_idle", "self", BEFORE, "observe:rest_when_idle",
        "before an idle server sleeps, the pools are checked and /metrics is updated",
    ),
    Patch(
        "sglang.srt.managers.scheduler.Scheduler.handle_generate_request", ("self recv_req", "self recv_req mm_input_error"),
        AROUND, "hardening:take_in",
        "an exception about one request answers that request, and does not end the others",
        due=STEP,
    ),
    Patch(
        "sglang.srt.managers.scheduler.validate_input_length", "req max_req_input_len allow_auto_truncate",
        AFTER, "hardening:refuse_empty",
        "the first request of a session may have no tokens",
        due=DECODE,
    ),
    Patch(
        "sglang.utils.TypeBasedDispatcher.__call__", "self obj", AROUND, "hardening:answer_control",
        "an exception about one control request answers that request",
        due=STEP,
    ),
    Patch(
        "sglang.srt.layers.logprob_processor.get_token_ids_logprobs_raw",
        "logprobs token_ids_logprobs_list stage extend_logprob_pruned_lens_cpu no_copy_to_cpu", AFTER, "hardening:even_values",
        "requests with and without token_ids_logprob may share a batch",
        until="0.5.23",
    ),
    Patch(
        "sglang.srt.sampling.custom_logit_processor.CustomLogitProcessor.from_str", "json_str", AROUND, "hardening:load_processor",
        "a client's processor that raises must end its own request only",
    ),
    Patch(
        "sglang.srt.layers.sampler.Sampler._preprocess_logits", "self logits sampling_info", AFTER, "hardening:keep_finite",
        "a request's options may make logits from which no token can be sampled",
        due=SAMPLE,
    ),
    *(
        Patch(
            f"sglang.srt.managers.scheduler_components.batch_result_processor.SchedulerBatchResultProcessor.{name}", parameters,
            AROUND, "mistakes:blame_options",
            "options that leave no token which the grammar allows are a client's mistake",
        )
        for name, parameters in (
            ("_apply_prefill_grammar", "self req next_token_id already_advanced"), ("_accept_grammar_tokens", "self req tokens"),
        )
    ),
    Patch(
        "sglang.srt.managers.schedule_batch.Req._check_str_based_finish", "self new_accepted_len", AROUND, "hardening:find_stop_regex",
        "a regular expression may search for ever",
        due=DECODE,
    ),
    Patch(
        "sglang.srt.constrained.base_grammar_backend.BaseGrammarBackend._init_value_dispatch", "self key require_reasoning",
        AROUND, "hardening:compile_grammar",
        "SGLang's except clauses do not catch a panic of a grammar's compiler",
    ),
    Patch(
        "sglang.srt.managers.schedule_batch.ScheduleBatch.prepare_for_decode", "self", BEFORE, "hardening:forget_overrides",
        "input embeddings of a prompt would keep all its decode steps off the graph",
        until="0.5.23", due=DECODE,
    ),
    *(
        Patch(
            f"sglang.srt.managers.scheduler_components.profiler_manager.SchedulerProfilerManager.{name}", parameters,
            AROUND, "hardening:profile",
            "a profile that cannot be written ends the step that it records, or goes on for ever",
            due=due,
        )
        for name, parameters, due in (("_profile_batch_predicate", "self batch", STEP), ("_stop_profile", "self stage", None))
    ),
)

SCHEDULER_ON_CPU = (
    Patch(
        "sglang.srt.constrained.grammar_manager.create_grammar_backend", "server_args tokenizer vocab_size eos_token_ids think_end_ids",
        AROUND, "grammars:create_backend",
        "a tokenizer that llguidance cannot read would end the server at its start",
    ),
    Patch(
        "sglang.srt.constrained.llguidance_backend.GuidanceGrammar.apply_vocab_mask", "logits vocab_mask", REPLACE, "grammars:apply_mask",
        "llguidance's own mask is compiled at its first use, while the scheduler waits for half a minute",
    ),
    Patch(
        "sglang.srt.constrained.llguidance_backend.GuidanceBackend.dispatch_structural_tag", "self key_string",
        AROUND, "grammars:required_tags",
        "the grammar that SGLang makes for a required tool call allows an answer without one",
    ),
    Patch(
        "sglang.srt.utils.common.support_triton", "backend", AROUND, "cpu:support_triton",
        "SGLang assumes that a backend with an unknown name runs Triton; later releases ask the platform",
        until="0.5.22", due=STEP,
    ),
    Patch(
        "sglang.srt.mem_cache.allocator.paged.PagedTokenToKVPoolAllocator.alloc_extend",
        "self prefix_lens prefix_lens_cpu seq_lens seq_lens_cpu last_loc extend_num_tokens num_new_pages",
        AROUND, "cpu:alloc_extend",
        "SGLang hands out pages with a Triton kernel",
        until="0.5.22", due=STEP,
    ),
    Patch(
        "sglang.srt.mem_cache.allocator.paged.PagedTokenToKVPoolAllocator.alloc_decode",
        "self seq_lens seq_lens_cpu last_loc", AROUND, "cpu:alloc_decode",
        "the same for the one token of a decode step",
        until="0.5.22", due=DECODE,
    ),
    Patch(
        "sglang.srt.distributed.parallel_state.init_model_parallel_group", None, AROUND, "cpu:without_nccl",
        "SGLang lets ranks talk by NCCL where its library is installed, GPU or not",
        due=START,
    ),
    Patch(
        "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator.configure", "self pre_model_load_memory", AROUND,
        "cpu:configure_pools",
        "SGLang refuses fp8 KV on a CPU without AMX, which its own attention needs for it",
        since="0.5.22", due=START,
    ),
    Patch(
        "torch.get_device_module", "device", AROUND, "linear_attention:device_module",
        "a PyTorch that was built for CUDA names CUDA's current device, on which models put the norm behind linear attention",
    ),
    Patch(
        "sglang.kernels.ops.attention.fla.fused_norm_gate.FusedRMSNormGated.forward",
        "self x g residual prenorm residual_in_fp32", REPLACE, "linear_attention:gated_norm",
        "it is a Triton kernel, unless the CPU has AMX",
    ),
    Patch(
        "sglang.kernels.ops.attention.fla.layernorm_gated.RMSNorm.forward", "self x z", REPLACE, "linear_attention:gated_norm",
        "the same, in other models",
    ),
    Patch(
        "sglang.kernels.ops.elementwise.elementwise.fused_gate_sigmoid_mul_add",
        "hidden_states gate_weight shared_output final_hidden_states", REPLACE, "linear_attention:gated_expert",
        "experts that all tokens share are added by a Triton kernel",
    ),
    Patch(
        "sglang.kernels.ops.mamba.mamba_state_scatter_triton.track_mamba_states_all_layers",
        "conv_states_pool ssm_states_pool cache_indices mamba_track_mask mamba_track_indices batch_size check_freed_slots",
        REPLACE, "linear_attention:track_states",
        "a Triton kernel copies the states that a decode step leaves to the prefix cache",
    ),
    Patch(
        "sglang.srt.layers.moe.moe_runner.triton_utils.fused_moe.swiglu_gpt_oss_sigmoid_alpha", "x gemm1_alpha gemm1_limit",
        REPLACE, "compiled:clamped_swiglu",
        "it is compiled at its first use, which takes a C++ compiler, and the scheduler waits for a quarter of a minute",
    ),
    Patch(
        "sglang.srt.models.commandr.layer_norm_func", "hidden_states weight variance_epsilon", REPLACE, "compiled:layer_norm", "the same",
    ),
    Patch(
        "torch.Tensor.pin_memory", None, AROUND, "linear_attention:pageable",
        "a decode step with states pins memory, GPU or not",
    ),
)
# fmt: on

TABLES = (FRONT, LAUNCHER, SERVER, LAUNCHER_ON_CPU, SCHEDULER, SCHEDULER_ON_CPU)


def launcher(device: str) -> tuple[Patch, ...]:
    """Hooks of the process that starts an HTTP server, or has made the ``Engine``."""
    return SERVER + worker(device)


def worker(device: str) -> tuple[Patch, ...]:
    """Hooks of a process that takes requests: the launcher, or a tokenizer worker."""
    return LAUNCHER + (LAUNCHER_ON_CPU if device == "cpu" else ())


def scheduler(device: str) -> tuple[Patch, ...]:
    """Hooks of a scheduler."""
    return SCHEDULER + (SCHEDULER_ON_CPU if device == "cpu" else ())
