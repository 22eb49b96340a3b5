"""What `torchtitan_overlay` prepares before upstream's modules are imported."""

import torch

import torchtitan_overlay
from torchtitan.models.attention import FlexAttentionWrapper, VarlenAttentionWrapper


def test_upstreams_attention_is_compiled_when_it_is_called(monkeypatch):
    name = torchtitan_overlay._compile_when_called.__qualname__
    for function in (FlexAttentionWrapper._compiled_flex_attn, VarlenAttentionWrapper._compiled_varlen_attn):
        assert function.__qualname__.startswith(name)
    assert torch.compile.__module__ == "torch", "as it was"
    compiled = []

    def compiles(function, **options):
        compiled.append(options)
        return lambda *args, **kwargs: -function(*args, **kwargs)

    monkeypatch.setattr(torch, "compile", compiles)
    function = torchtitan_overlay._compile_when_called(lambda x, by: x * by, mode="reduce-overhead")
    assert compiled == []
    assert [function(3, by=2), function(4, by=2)] == [-6, -8]
    assert compiled == [{"mode": "reduce-overhead"}], "once"
