"""The name of our weight-transfer engine in vLLM, `--weight-transfer-config '{"backend": "torchtitan_grpo"}'`, and of
what it tells.

It imports nothing, since the trainer, which has no vLLM, imports it too.
"""

BACKEND = "torchtitan_grpo"
FINGERPRINTS = "torchtitan_grpo_fingerprints"
"""The method of vLLM's route `/collective_rpc` that tells Hugging Face name -> `adapters.fingerprint` of what a worker
holds. The embedded server has it too."""
