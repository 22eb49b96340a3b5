"""Direct loading against a toy engine whose loaders and layer-wise reload work as vLLM's do."""

import contextlib

import pytest
import torch
from torch import nn

from torchtitan.grpo.inside_vllm.direct_load import DirectLoading
from torchtitan.grpo.inside_vllm.load_recording import NotDirectError, record
from torchtitan.grpo.weight_wire.buckets import TRAILER_BYTES, TensorSpec, plan_buckets

CPU = torch.device("cpu")
DTYPE = torch.bfloat16
DIM, HEADS, KV_HEADS, HEAD_DIM, FFN, VOCAB = 16, 4, 2, 6, 20, 50
VOCAB_PADDED = 64
BIAS = "model.layers.1.o_proj.bias"


class EngineParameter(nn.Parameter):
    """As vLLM's: a subclass, which torch functions see."""

    def __new__(cls, data, loader):
        return super().__new__(cls, data, requires_grad=False)

    def __init__(self, data, loader):
        self.loader = loader

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return super().__torch_function__(func, types, args, kwargs or {})


def load_whole(param, loaded):
    assert param.size() == loaded.size()
    param.data.copy_(loaded)


class ToyModel(nn.Module):
    """Two layers of fused q, k, v, a row-parallel output, fused gate and up, one norm; rank `rank` of `ranks`."""

    def __init__(self, ranks=1, rank=0, tied=False, layers=2):
        super().__init__()
        self.ranks, self.rank, self.tied = ranks, rank, tied
        self.loaders = {}
        self.model = nn.Module()
        self.model.embed_tokens = self._linear(VOCAB_PADDED // ranks, DIM, self._load_embedding)
        self.model.layers = nn.ModuleList()
        for _ in range(layers):
            layer = nn.Module()
            layer.qkv_proj = self._linear((HEADS + 2 * KV_HEADS) * HEAD_DIM // ranks, DIM, self._load_stacked)
            layer.o_proj = self._linear(DIM, HEADS * HEAD_DIM // ranks, self._load_row)
            layer.o_proj.bias = nn.Parameter(torch.randn(DIM, dtype=DTYPE))
            layer.gate_up_proj = self._linear(2 * FFN // ranks, DIM, self._load_stacked)
            layer.norm = nn.Module()
            layer.norm.weight = nn.Parameter(torch.randn(HEAD_DIM + 1, dtype=DTYPE))
            self.model.layers.append(layer)
        self.lm_head = self._linear(VOCAB_PADDED // ranks, DIM, self._load_embedding)
        if tied:
            self.lm_head.weight = self.model.embed_tokens.weight

    @staticmethod
    def _linear(rows, columns, loader):
        module = nn.Module()
        module.weight = EngineParameter(torch.randn(rows, columns, dtype=DTYPE), loader)
        return module

    def _load_embedding(self, param, loaded):
        start = self.rank * param.shape[0]
        loaded = loaded.narrow(0, start, max(0, min(param.shape[0], VOCAB - start)))
        param[: loaded.shape[0]].data.copy_(loaded)
        param[loaded.shape[0] :].data.fill_(0)

    def _load_stacked(self, param, loaded, start, size):
        start, size = start // self.ranks, size // self.ranks
        target = param.data.narrow(0, start, size)
        loaded = loaded.narrow(0, self.rank * size, size)
        assert target.shape == loaded.shape
        target.copy_(loaded)

    def _load_row(self, param, loaded):
        size = param.data.shape[1]
        param.data.copy_(loaded.narrow(1, self.rank * size, size))

    def load_weights(self, weights):
        q, kv = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
        stacked = {
            "q_proj": ("qkv_proj", 0, q),
            "k_proj": ("qkv_proj", q, kv),
            "v_proj": ("qkv_proj", q + kv, kv),
            "gate_proj": ("gate_up_proj", 0, FFN),
            "up_proj": ("gate_up_proj", FFN, FFN),
        }
        params = dict(self.named_parameters())
        loaded_names = set()
        for name, loaded in weights:
            part = name.split(".")[-2]
            fused, *where = stacked.get(part, (part,))
            name = name.replace(part, fused)
            param = params[name]
            self.load_one(name, param, loaded, where)
            loaded_names.add(name)
        return loaded_names

    def load_one(self, name, param, loaded, where):
        getattr(param, "loader", load_whole)(param, loaded, *where)


class ToyEngine:
    """A layer-wise reload: fresh tensors are loaded, processed, and copied into the storage that was there before."""

    def __init__(self, model):
        self.model = model
        self.prepared = 0
        self._kept = None

    def start(self):
        self.prepared += 1
        if self._kept is not None:
            return
        self._kept = []
        fresh = {}
        for module in self.model.modules():
            for key, param in list(module._parameters.items()):
                self._kept.append((module, key, param))
                if param not in fresh:
                    fresh[param] = nn.Parameter(torch.full_like(param.data, torch.nan), requires_grad=False)
                    fresh[param].__class__, fresh[param].__dict__ = param.__class__, param.__dict__.copy()
                setattr(module, key, fresh[param])

    def finish(self):
        for module, key, kept in self._kept:
            kept.data.copy_(self.process(key, getattr(module, key)))
            module._parameters[key] = kept
        self._kept = None

    def process(self, key, param):
        return param


def plan(tied=False, dtype=DTYPE, layers=2, without=(), limit=1 << 10):
    """Buckets of the toy's checkpoint; several tensors a bucket, several buckets."""
    shapes = {"model.embed_tokens.weight": (VOCAB, DIM)}
    for i in range(layers):
        shapes |= {
            f"model.layers.{i}.q_proj.weight": (HEADS * HEAD_DIM, DIM),
            f"model.layers.{i}.k_proj.weight": (KV_HEADS * HEAD_DIM, DIM),
            f"model.layers.{i}.v_proj.weight": (KV_HEADS * HEAD_DIM, DIM),
            f"model.layers.{i}.o_proj.weight": (DIM, HEADS * HEAD_DIM),
            f"model.layers.{i}.o_proj.bias": (DIM,),
            f"model.layers.{i}.gate_proj.weight": (FFN, DIM),
            f"model.layers.{i}.up_proj.weight": (FFN, DIM),
            f"model.layers.{i}.norm.weight": (HEAD_DIM + 1,),
        }
    if not tied:
        shapes["lm_head.weight"] = (VOCAB, DIM)
    specs = [TensorSpec(name, dtype, shape) for name, shape in shapes.items() if name not in without]
    buckets = plan_buckets(specs, limit)
    assert limit > 1 << 10 or len(buckets) > 3
    return buckets


def wires(buckets, seed):
    """Buckets as they come: random weights of version `seed`, bytes between tensors and trailers without meaning."""
    generator = torch.Generator().manual_seed(seed)
    result = []
    for bucket in buckets:
        wire = torch.randint(0, 256, (bucket.wire_bytes,), dtype=torch.uint8, generator=generator)
        for _, tensor in bucket.views(wire):
            tensor.copy_(torch.randn(tensor.shape, generator=generator))
        assert wire.numel() == bucket.payload_bytes + TRAILER_BYTES
        result.append(wire)
    return result


def bits(model):
    return {name: param.data.clone().view(torch.int16) for name, param in model.named_parameters()}


def equal(left, right):
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def expected(model_args, buckets, seed):
    """What the model's own load_weights makes of a version."""
    model = ToyModel(**model_args)
    for bucket, wire in zip(buckets, wires(buckets, seed), strict=True):
        model.load_weights(bucket.views(wire))
    return bits(model)


def recorded(model, buckets):
    return record(model, buckets, model.load_weights, CPU)


def update(engine, direct, seed, fail_at=None):
    """One update as the plug-in does it. Returns whether it went by copies."""
    if not direct.begin():
        engine.start()
    received = wires(direct.buckets, seed)
    for bucket in direct.buckets:
        if bucket.index == fail_at:
            assert not direct.complete
            return None
        direct.load(bucket, received[bucket.index])
        received[bucket.index] = None
    assert direct.complete
    went_direct = direct.active
    direct.finish(engine.finish)
    return went_direct


def direct_for(engine, buckets, **kwargs):
    said = []
    return DirectLoading(engine.model, buckets, engine.model.load_weights, CPU, say=said.append, **kwargs), said


MODELS = [dict(), dict(tied=True), dict(ranks=2, rank=0), dict(ranks=2, rank=1), dict(ranks=2, rank=1, tied=True)]


@pytest.mark.parametrize("model_args", MODELS)
def test_recording_leaves_weights_as_they_are(model_args):
    model = ToyModel(**model_args)
    before = bits(model)
    buckets = plan(model.tied)
    recording = recorded(model, buckets)
    assert equal(before, bits(model))
    assert recording.parameters == len(before)
    assert len(recording.copies) == sum(len(bucket.tensors) for bucket in buckets)
    assert {copy.bucket for copy in recording.copies} == set(range(len(buckets)))


@pytest.mark.parametrize("model_args", MODELS)
@pytest.mark.parametrize("limit", [1 << 10, 1 << 20])
def test_the_second_update_goes_by_copies_and_equals_load_weights(model_args, limit):
    engine = ToyEngine(ToyModel(**model_args))
    places = {name: param.data_ptr() for name, param in engine.model.named_parameters()}
    buckets = plan(engine.model.tied, limit=limit)
    direct, said = direct_for(engine, buckets)
    went = []
    for seed in (1, 2, 3, 1):
        went.append(update(engine, direct, seed))
        assert equal(bits(engine.model), expected(model_args, buckets, seed))
    assert went == [False, True, True, True]
    assert engine.prepared == 1
    copies = sum(len(bucket.tensors) for bucket in buckets)
    assert said == [f"direct loading: {copies} copies into {len(places)} parameters, proved by checksum"]
    assert places == {name: param.data_ptr() for name, param in engine.model.named_parameters()}
    sent = {name: view for b, wire in zip(buckets, wires(buckets, 1), strict=True) for name, view in b.views(wire)}
    held = dict(direct.held())
    assert held.keys() == sent.keys() if engine.model.ranks == 1 else held.keys() < sent.keys()
    assert held and all(torch.equal(tensor, sent[name]) for name, tensor in held.items())
    name = min(held)
    engine.model.get_parameter(name).data.view(-1)[0] += 1
    assert [other for other, tensor in direct.held() if not torch.equal(tensor, sent[other])] == [name]


def test_a_failed_update_is_repaired_by_the_next():
    engine = ToyEngine(ToyModel())
    buckets = plan()
    direct, _ = direct_for(engine, buckets)
    assert update(engine, direct, 1, fail_at=2) is None  # while proving: the engine's tensors are put away
    assert update(engine, direct, 2) is False
    assert equal(bits(engine.model), expected({}, buckets, 2))
    assert update(engine, direct, 3, fail_at=2) is None  # while direct: a mix of 2 and 3
    assert not equal(bits(engine.model), expected({}, buckets, 2))
    assert update(engine, direct, 4) is True
    assert equal(bits(engine.model), expected({}, buckets, 4))


def test_parameters_that_moved_are_learned_again():
    engine = ToyEngine(ToyModel())
    buckets = plan()
    direct, said = direct_for(engine, buckets)
    update(engine, direct, 1)
    norm = engine.model.model.layers[0].norm
    norm.weight = nn.Parameter(norm.weight.data.clone())
    assert [update(engine, direct, seed) for seed in (2, 3)] == [False, True]
    assert equal(bits(engine.model), expected({}, buckets, 3))
    assert [line.split(",")[0] for line in said[1:2]] == ["direct loading: parameters have moved"]


def test_learning_waits_while_the_model_is_on_meta():
    engine = ToyEngine(ToyModel())
    direct, said = direct_for(engine, plan())
    norm = engine.model.model.layers[0].norm
    kept, norm.weight = norm.weight, nn.Parameter(torch.empty(HEAD_DIM + 1, device="meta"))
    assert direct.begin() is False
    norm.weight = kept
    assert not said
    assert [update(engine, direct, seed) for seed in (1, 2)] == [False, True]


class Loading(ToyModel):
    """A toy whose loader of one bias is another."""

    def __init__(self, load):
        super().__init__()
        self.register_buffer("scale", torch.ones(DIM, dtype=DTYPE))
        self.load = load

    def load_one(self, name, param, loaded, where):
        if name == BIAS:
            self.load(self, param, loaded)
        else:
            super().load_one(name, param, loaded, where)


def swallow(model, param, loaded):
    with contextlib.suppress(Exception):
        param.data.copy_(loaded + 1)


def replace_parameter(model, param, loaded):
    model.model.layers[1].o_proj.bias = nn.Parameter(loaded)


REFUSED_LOADERS = {
    "arithmetic": (lambda m, p, w: p.data.copy_(w + 1), "aten.add.Tensor on a received"),
    "arithmetic, error swallowed": (swallow, "aten.add.Tensor on a received"),
    "other dtype": (lambda m, p, w: p.data.copy_(w.to(torch.float32)), "aten._to_copy.default on a received"),
    "value on the host": (lambda m, p, w: p.data.fill_(w[0].item()), "_local_scalar_dense.default on a received"),
    "compares": (lambda m, p, w: p.data.copy_(w) if (w == w).all() else None, "aten.eq.Tensor on a received"),
    "concatenates": (lambda m, p, w: p.data.copy_(torch.cat([w[8:], w[:8]])), "aten.cat.default on a received"),
    "clones": (lambda m, p, w: p.data.copy_(w.clone()), "aten.clone.default on a received"),
    "changes in place": (lambda m, p, w: (p.data.copy_(w), p.data.mul_(2)), "load_weights uses aten.mul_"),
    "changes what was received": (lambda m, p, w: p.data.copy_(w.mul_(2)), "load_weights uses aten.mul_"),
    "into a buffer": (lambda m, p, w: m.scale.copy_(w), "on something that is not a parameter"),
    "keeps a copy": (lambda m, p, w: torch.empty(DIM, dtype=DTYPE).copy_(w), "on something that is not a parameter"),
    "broadcasts": (lambda m, p, w: p.data.copy_(w[:1]), r"bfloat16 \[1\] is received for torch.bfloat16 \[16\]"),
    "skips": (lambda m, p, w: None, f"does not fill {BIAS} exactly"),
    "half": (lambda m, p, w: p.data[:8].copy_(w[:8]), f"does not fill {BIAS} exactly"),
    "every other": (lambda m, p, w: p.data[::2].copy_(w[::2]), f"does not fill {BIAS} exactly"),
    "twice": (lambda m, p, w: (p.data.copy_(w), p.data[3:].copy_(w[3:])), "writes some elements twice"),
    "over padding": (lambda m, p, w: (p.data.fill_(0), p.data.copy_(w)), "writes some elements twice"),
    "rebinds data": (lambda m, p, w: setattr(p, "data", w), "replaces parameters"),
    "replaces the parameter": (replace_parameter, "replaces parameters"),
    "raises": (lambda m, p, w: w.view(3), "load_weights raised RuntimeError: shape"),
}


@pytest.mark.parametrize("name", REFUSED_LOADERS)
def test_a_loader_that_does_more_or_less_than_copying_is_refused(name):
    load, reason = REFUSED_LOADERS[name]
    model = Loading(load)
    before, scale, bias = bits(model), model.scale.clone(), model.model.layers[1].o_proj.bias
    with pytest.raises(NotDirectError, match=reason):
        recorded(model, plan())
    assert equal(before, bits(model))
    assert torch.equal(scale, model.scale)
    assert model.model.layers[1].o_proj.bias is bias


@pytest.mark.parametrize(
    "load",
    [
        lambda m, p, w: p.data.view(4, 4).t().copy_(w.view(4, 4).t()),
        lambda m, p, w: [p.data[i::2].copy_(w[i::2]) for i in range(2)],
        lambda m, p, w: p.detach().copy_(w.detach().reshape(2, 8).unsqueeze(0)[0].flatten().contiguous().to(p.device)),
        lambda m, p, w: [p.data[i : i + 4].copy_(w.chunk(4)[i // 4]) for i in (8, 0, 12, 4)],
    ],
)
def test_views_of_any_shape_are_copied_rightly(load):
    engine = ToyEngine(Loading(load))
    buckets = plan()
    direct, said = direct_for(engine, buckets)
    reference = Loading(load)
    for seed in (1, 2):
        update(engine, direct, seed)
    assert direct.active, said
    for bucket, wire in zip(buckets, wires(buckets, 2), strict=True):
        reference.load_weights(bucket.views(wire))
    assert equal(bits(engine.model), bits(reference))


def test_a_parameter_that_nobody_loads_is_refused():
    for without in (BIAS, "model.layers.0.k_proj.weight"):
        with pytest.raises(NotDirectError, match=r"does not fill model\.layers"):
            recorded(ToyModel(), plan(without=[without]))


def test_a_parameter_that_no_update_fills_may_be_excluded():
    model = ToyModel()
    buckets = plan(without=["lm_head.weight"])
    with pytest.raises(NotDirectError, match=r"does not fill lm_head.weight"):
        recorded(model, buckets)
    assert record(model, buckets, model.load_weights, CPU, {"lm_head.weight"}).parameters == len(bits(model)) - 1


def test_another_dtype_than_the_engines_is_refused():
    with pytest.raises(NotDirectError, match=r"torch.float32 \[50, 16\] is received for torch.bfloat16"):
        recorded(ToyModel(), plan(dtype=torch.float32))


def flipped_unseen(self, key, param):
    # numpy is not dispatched: only the checksum can tell
    param.data.view(torch.int16).numpy()[:] = param.data.view(torch.int16).numpy()[::-1].copy()
    return param


def packed_beside(self, key, param):
    packed = torch.empty(param.shape, dtype=param.dtype)
    packed.copy_(param.data)
    self.__dict__.setdefault("packed", []).append(packed)
    return param


def changes_a_value_and_back(self, key, param):
    return param.data.mul_(1)


def padded_with_ones(self, key, param):
    if param.shape[0] == VOCAB_PADDED:
        param.data[VOCAB:].fill_(1)
    return param


REFUSED_ENGINES = {
    flipped_unseen: "places do not hold what was received for them",
    packed_beside: "keeps weights in 12 places that are not parameters",
    changes_a_value_and_back: "the engine uses aten.mul_.Tensor on a weight",
    padded_with_ones: "2 of 20 places do not hold",
    lambda self, key, param: param.data.flip(0): "the engine uses aten.flip.default on a weight",
    lambda self, key, param: param.data.t().contiguous().t(): "the engine uses aten.clone.default on a weight",
    lambda self, key, param: [param, param.data[0].sum().item()][0]: "aten.sum.default on a weight",
    lambda self, key, param: param.data.to(torch.float32): "aten._to_copy.default on a weight",
}


@pytest.mark.parametrize("process", REFUSED_ENGINES)
def test_an_engine_that_does_more_than_copying_stays_layerwise(process):
    class Engine(ToyEngine):
        pass

    Engine.process = process
    engine = Engine(ToyModel())
    reference = Engine(ToyModel())
    buckets = plan()
    direct, said = direct_for(engine, buckets)
    assert [update(engine, direct, seed) for seed in (1, 2, 3)] == [False, False, False]
    assert engine.prepared == 3
    assert len(said) == 1
    assert said[0].startswith("layer-wise loading: ")
    assert REFUSED_ENGINES[process] in said[0]
    never, _ = direct_for(reference, buckets, refused="for comparison")
    update(reference, never, 3)
    assert equal(bits(engine.model), bits(reference.model))


def test_an_engine_that_keeps_what_it_received_stays_layerwise():
    kept = []
    engine = ToyEngine(Loading(lambda m, p, w: (p.data.copy_(w), kept.append(w))))
    direct, said = direct_for(engine, plan())
    assert [update(engine, direct, seed) for seed in (1, 2)] == [False, False]
    assert said == ["layer-wise loading: the engine keeps weights in 1 places that are not parameters"]


def test_an_engine_that_moves_its_parameters_stays_layerwise():
    class Engine(ToyEngine):
        def finish(self):
            self._kept = None

    engine = Engine(ToyModel())
    direct, said = direct_for(engine, plan())
    assert [update(engine, direct, seed) for seed in (1, 2)] == [False, False]
    assert said == ["layer-wise loading: the engine's own loading puts parameters elsewhere"]


def test_an_update_that_lacks_a_bucket_proves_nothing():
    engine = ToyEngine(ToyModel())
    buckets = plan()
    direct, said = direct_for(engine, buckets)
    direct.begin()
    engine.start()
    for bucket, wire in list(zip(buckets, wires(buckets, 1), strict=True))[:-1]:
        direct.load(bucket, wire)
    assert not direct.complete
    direct.finish(engine.finish)
    assert not direct.active
    assert said == ["layer-wise loading: not every bucket of the update was loaded"]


def test_refused_from_the_start():
    engine = ToyEngine(ToyModel())
    direct, said = direct_for(engine, plan(), refused="quantization is fp8")
    assert [update(engine, direct, seed) for seed in (1, 2)] == [False, False]
    assert said == ["layer-wise loading: quantization is fp8"]
