"""Code that runs inside a vLLM server. Of this project it imports `weight_wire` only.

    process         at start                        when `--weight-transfer-config` names our backend
    API server      plugin.register: two hooks      flat_logprobs; replies adds fields
                                                    prompt_scores: a teacher's tokens as arrays
                                                    served_model: /v1/models tells the model's shape
                                                    quick_pause: /pause does not sleep
                                                    whole_update: /update_weights does all of it
                                                    before_vllm_0_32: versions of tokens, for older vLLMs
                    adapter_requests: with --enable-lora, each request gets the trainer's adapter
                    api_key.ApiKeyMiddleware, if a flag names it
    engine core     plugin.register: two hooks      bundled_outputs; quick_slots; old_prefixes; whole_update;
                                                    it ends with its parent
    worker          plugin.register: two hooks      transfer_engine; it ends with its parent
                                                      weight_wire.receiver: buckets in, checksums verified
                                                      direct_load, load_recording: buckets into parameters
                                                      adapters: LoRA, tensors into vLLM's slot; base_weights: whose

A vLLM that is started with another backend, or with none, runs unchanged. It imports only `plugin`
and `backend`, the backend's name, which the trainer imports too.
"""
