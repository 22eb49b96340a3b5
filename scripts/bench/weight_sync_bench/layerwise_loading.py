"""A vLLM server without `inside_vllm.direct_load`, to measure what direct loading saves.

    PYTHONPATH=scripts/bench bash scripts/serve_vllm.sh MODEL ... \
        --worker-extension-cls weight_sync_bench.layerwise_loading.LayerwiseLoading

vLLM imports the class in each worker, before the worker loads its model. The server's log then says "layer-wise
loading" for this reason, in place of "direct loading". Start a second server without the flag and run `refit` on each.
"""

from torchtitan.grpo.inside_vllm.transfer_engine import TorchtitanGrpoEngine


class LayerwiseLoading:
    """Adds nothing to the worker."""


def _not_direct(engine: TorchtitanGrpoEngine) -> str:
    return "it is being measured"


TorchtitanGrpoEngine._not_direct = _not_direct
