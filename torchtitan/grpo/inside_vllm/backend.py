"""The name of our weight-transfer engine in vLLM: `--weight-transfer-config '{"backend": "torchtitan_grpo"}'`.

It imports nothing, since the trainer, which has no vLLM, imports it too.
"""

BACKEND = "torchtitan_grpo"
