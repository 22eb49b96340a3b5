"""The packed model on CUDA: varlen attention in bfloat16, compiled and not, against transformers in float32."""

from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from tests.helpers import any_models
from tests.helpers.ranks import free_port
from torchtitan.config import JobConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed import utils as dist_utils
from torchtitan.grpo.model import flash_attention as attention
from torchtitan.grpo.model import packed as packed_model
from torchtitan.grpo.model.by_document import plain_functions
from torchtitan.grpo.model.document_attention import attend
from torchtitan.grpo.model.flash_operator import MODULE, row_kernels
from torchtitan.grpo.model.logprobs import product, token_logprobs
from torchtitan.grpo.model.parallelize import build_model
from torchtitan.grpo.model.shards import local
from torchtitan.grpo.model.source import load_hf_weights, resolve_model
from torchtitan.grpo.policy.microbatch import Microbatch
from torchtitan.grpo.policy.packing import pack
from torchtitan.grpo.policy.rows import PackedSample

DEVICE = torch.device("cuda", 0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=1000,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=512,
        tie_word_embeddings=True,
    )
    path = tmp_path_factory.mktemp("model")
    Qwen3ForCausalLM(config).save_pretrained(path)
    return path


@pytest.fixture(scope="module", autouse=True)
def process_group():
    import os

    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}.items():
        os.environ.setdefault(name, value)
    os.environ.setdefault("MASTER_PORT", str(free_port()))
    torch.cuda.set_device(DEVICE)
    dist_utils.init_distributed(JobConfig().comm, base_folder=".")
    yield
    torch.distributed.destroy_process_group()


def build(
    folder,
    precision: str,
    compile: bool,
    flash_attention: str = "FA2",
    keeps: str = "op",
    logits_dtype: str = "float32",
):
    config = JobConfig()
    config.training = SimpleNamespace(
        dtype="float32",
        mixed_precision_param=precision,
        mixed_precision_reduce="float32",
        seq_len=512,
        kept_logits_mib=1,
        logits_dtype=logits_dtype,
        flash_attention=flash_attention,
    )
    config.activation_checkpoint.mode = "selective"
    config.activation_checkpoint.selective_ac_option = keeps
    config.compile.enable = compile
    dims = ParallelDims(1, 1, 1, 1, 1, 1, 1, 1)
    source = resolve_model(SimpleNamespace(hf_assets_path=str(folder), weights="hf"), 512)
    model = build_model(source, config, dims, DEVICE)
    load_hf_weights(model, source, folder)
    return model


def samples() -> list[PackedSample]:
    generator = torch.Generator().manual_seed(2)
    lengths = [(3, 5), (1, 1), (100, 300), (17, 30), (40, 2), (2, 60), (8, 9)]
    draw = lambda n: torch.randint(0, 1000, (n,), generator=generator).tolist()  # noqa: E731
    return [PackedSample(draw(p), draw(a), 1.0, 1.0, [0.0] * a) for p, a in lengths]


def group(answers: tuple[int, ...] = (20, 150, 7)) -> list[PackedSample]:
    """Samples with one prompt, which a row has once."""
    generator = torch.Generator().manual_seed(3)
    draw = lambda n: torch.randint(0, 1000, (n,), generator=generator).tolist()  # noqa: E731
    prompt = draw(61)
    return [PackedSample(prompt, draw(n), 1.0, 1.0, [0.0] * n) for n in answers]


def expected(folder, batch: list[PackedSample]) -> list[torch.Tensor]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(DEVICE)
    result = []
    with torch.no_grad(), plain_functions(type(model)):
        for sample in batch:
            ids = torch.tensor([sample.prompt_ids + sample.answer_ids], device=DEVICE)
            logprobs = model(ids).logits[0, len(sample.prompt_ids) - 1 : -1].log_softmax(-1)
            result.append(logprobs.gather(1, ids[0, len(sample.prompt_ids) :, None])[:, 0])
    return result


def assert_learns(model: torch.nn.Module, row: Microbatch, logprobs: torch.Tensor) -> None:
    """Three steps make the row's answers likelier than these log-probabilities of it."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    before = logprobs.sum().item()
    for _ in range(3):
        optimizer.zero_grad()
        (-model(row, 1.0)[0].sum()).backward()
        optimizer.step()
    assert model(row, 1.0)[0].sum().item() > before + 10


@pytest.mark.parametrize(
    "precision,compile,tolerance", [("float32", False, 1e-4), ("bfloat16", False, 0.1), ("bfloat16", True, 0.1)]
)
@pytest.mark.parametrize(("flash_attention", "keeps"), [("FA2", "op"), ("FA4", "op"), ("FA4", "matmul")])
def test_logprobs_equal_transformers_and_train(folder, precision, compile, tolerance, flash_attention, keeps):
    if flash_attention == "FA4":
        pytest.importorskip(MODULE, reason="flash-attn-4 is not installed")
    torch.backends.cuda.matmul.allow_tf32 = False
    batch = samples() + group()
    model = build(folder, precision, compile, flash_attention, keeps)
    (row,) = pack(batch, 896, 1, 896)[0]
    row = Microbatch.of(row, DEVICE)
    assert len(row.keys.positions) == len(row.tokens) + 2 * 60
    reference = expected(folder, batch)
    want = torch.cat([reference[i] for i in row.samples.tolist()])
    logprobs, entropy = model(row, 1.0)
    assert (logprobs - want).abs().max() < tolerance
    assert entropy.isfinite().all()
    assert_learns(model, row, logprobs)


@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize("kind", ["gemma3_text", "olmo3", "falcon_h1", "qwen3_5_text"])
def test_classes_of_transformers_equal_themselves_and_train(kind, compile, tmp_path):
    """With windows, and with recurrent states by flash-linear-attention where it is installed."""
    more = {"sliding_window": 64} if "sliding_window" in any_models.KINDS[kind] else {}
    sizes = dict(vocab_size=1000, max_position_embeddings=512, initializer_range=0.02)
    any_models.save(kind, tmp_path, **sizes, **more)
    batch = samples() + group()
    model = build(tmp_path, "bfloat16", compile)
    (row,) = pack(batch, 896, 1, 896)[0]
    row, order = Microbatch.of(row, DEVICE), row.samples.tolist()
    reference = expected(tmp_path, batch)
    want = torch.cat([reference[i] for i in order])
    logprobs, _ = model(row, 1.0)
    assert (logprobs - want).abs().max() < 0.05
    assert_learns(model, row, logprobs)


@pytest.mark.parametrize("head_dim", [64, 256])
@pytest.mark.parametrize("version", [2, 4])
def test_a_window_of_the_kernels_is_that_of_a_mask(version, head_dim):
    """Output and gradients, with documents that attend to a prompt of an earlier one."""
    if version == 4:
        pytest.importorskip(MODULE, reason="flash-attn-4 is not installed")
    *example, documents = attention._example(DEVICE, 4, 2, head_dim)

    def masked(q, k, v, documents, scale, window):
        return attend(*(x.transpose(0, 1)[None] for x in (q, k, v)), documents, scale, window=window)[0]

    exact = {
        window: attention._results(masked, *(x.float() for x in example), documents, window) for window in (0, 100)
    }
    for window in (0, 100):
        found = attention._results(partial(attention.attention, version=version), *example, documents, window)
        for ours, right, other in zip(found, exact[window], exact[100 - window], strict=True):
            assert (ours - right).norm() < attention.TOLERANCE * right.norm()
            assert (ours - other).norm() > 5 * attention.TOLERANCE * right.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_are_gathered_and_summed_as_torch_does(dtype):
    kernels = row_kernels(DEVICE)
    assert kernels is not None
    rng = torch.Generator().manual_seed(0)
    for shape in ((5, 3, 7), (300, 2, 700)):  # a part of a block, and more than one
        source = torch.randn(shape, generator=rng).to(DEVICE, dtype)
        index = torch.randint(shape[0], (2 * shape[0],), generator=rng).to(DEVICE)
        gathered = kernels.gather_rows(source, index)
        assert torch.equal(gathered, source[index])
        bounds = torch.cat([index.new_zeros(1), index.bincount(minlength=shape[0]).cumsum(0)]).int()
        sums = kernels.sum_rows(gathered, index.argsort(stable=True), bounds)
        expected = torch.zeros(shape, device=DEVICE).index_add_(0, index, gathered.float())
        torch.testing.assert_close(sums, expected.to(dtype))


@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize("flash_attention", ["FA2", "FA4"])
def test_a_prompt_that_answers_share_has_the_gradients_of_its_copies(folder, flash_attention, compile):
    if flash_attention == "FA4":
        pytest.importorskip(MODULE, reason="flash-attn-4 is not installed")
    batch = group((200, 3, 70)) + samples()[:1] + group((40, 41, 1))[::-1]
    found = {}
    for precision, share in (("bfloat16", True), ("bfloat16", False), ("float32", False)):
        model = build(folder, precision, compile and precision == "bfloat16", flash_attention)
        ((row,),) = pack(batch, 896, 1, 896, share_prompts=share)
        assert row.shared.any() == share
        model(Microbatch.of(row, DEVICE), 1.0)[0].sum().backward()
        found[precision, share] = torch.cat([local(p.grad).flatten() for p in model.parameters()])
    exact = found["float32", False]
    errors = [((found["bfloat16", share] - exact).norm() / exact.norm()).item() for share in (True, False)]
    assert errors[0] < 1.2 * errors[1] < 0.1  # rounding, and no more of it


def test_the_host_waits_for_nothing_in_forward_and_backward(folder):
    """From pinned row to gradients: with boolean masks the host waited for the device at every row."""
    model = build(folder, "bfloat16", compile=False)
    rows = pack(samples() + group(), 448, 1, 448)[0] + pack([], 448, 1, 448)[0]
    assert len(rows) >= 3 and any(row.shared.any() for row in rows)
    total = torch.zeros((), device=DEVICE)

    def train(row) -> None:
        row = Microbatch.of(row, DEVICE)
        logprobs, entropy = model(row, 1.0)
        loss = (row.weights * (row.advantages * logprobs + 0.1 * entropy)).sum()
        loss.backward()
        total.add_(loss.detach())

    train(rows[0])  # what is built on first use may wait
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for row in rows:
            train(row)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert total.isfinite()
    assert all(p.grad is None or p.grad.to_local().isfinite().all() for p in model.parameters())


def test_rows_moved_in_the_background_arrive_whole():
    """Many rows in flight at once: pinned memory is not given out again before its copy is done."""
    rows = [pack(batch, 640, 1, 640)[0][0] for batch in ([[sample] for sample in samples()] + [group()])] * 20
    torch.cuda._sleep(50_000_000)  # the copies queue up behind it
    moved = [Microbatch.of(row, DEVICE) for row in rows]
    for there, row in zip(moved, rows, strict=True):
        for name, expected in vars(Microbatch.of(row, "cpu")).items():
            found = getattr(there, name)
            if (
                name in ("max_seqlen", "answers_at") or expected is None
            ):  # a teacher's tokens and experts are not in every row
                assert np.array_equal(found, expected)
            elif name == "keys":
                assert all(torch.equal(its.cpu(), own) for its, own in zip(found[:-1], expected[:-1], strict=True))
            else:
                assert found.device == DEVICE and torch.equal(found.cpu(), expected), name


@pytest.mark.parametrize("compile", [False, True])
def test_a_teachers_tokens_have_the_logprobs_and_gradients_of_a_cpu(compile):
    rng = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(300, 32, generator=rng), torch.randn(2000, 32, generator=rng)
    others = torch.stack([torch.randperm(2000, generator=rng)[:20] for _ in range(300)]).int()
    others[::7, 3:9], targets = -1, others[:, 0].long()
    results = []
    for device in (torch.device("cpu"), DEVICE):
        h, w = (x.to(device).detach().requires_grad_() for x in (hidden, weight))
        options = {"others": others.to(device), "chunk_tokens": 128, "compile": compile and device == DEVICE}
        logprobs, entropy, of_others = token_logprobs(h, w, targets.to(device), 0.9, **options)
        (logprobs.sum() + entropy.sum() - (of_others.exp() * of_others).sum()).backward()
        results.append([x.cpu() for x in (logprobs, entropy, of_others, h.grad, w.grad)])
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(("tokens", "words"), [(1024, 32_000), (1, 1001), (37, 1000)])
def test_products_of_bfloat16_are_summed_and_kept_in_float32(tokens, words):
    hidden = torch.randn(tokens, 256, device=DEVICE).bfloat16()
    weight = torch.randn(words, 256, device=DEVICE).bfloat16() / 4
    product(hidden, weight.T, torch.float32)  # allocates what stays
    before = torch.cuda.memory_allocated(DEVICE)
    torch.cuda.reset_peak_memory_stats(DEVICE)
    logits = product(hidden, weight.T, torch.float32)
    if words > 10_000:  # no copy of a factor in float32
        assert torch.cuda.max_memory_allocated(DEVICE) - before < 1.05 * logits.nbytes
    exact = hidden.double() @ weight.double().T
    assert logits.dtype == torch.float32 and (logits - exact).abs().max() < 5e-4
    assert (product(hidden, weight.T, torch.bfloat16) - exact).abs().max() > 5e-3


@pytest.mark.parametrize("compile", [False, True])
def test_log_probabilities_of_bfloat16_states_are_those_of_float64(compile):
    hidden = torch.randn(600, 256, device=DEVICE).bfloat16()
    weight = torch.randn(32_000, 256, device=DEVICE).bfloat16() / 4
    exact = (hidden.double() @ weight.double().T).log_softmax(-1)
    targets = exact.exp().multinomial(1)[:, 0]
    expected = exact.gather(1, targets[:, None])[:, 0]
    leaves = [x.double().requires_grad_() for x in (hidden, weight)]
    (leaves[0] @ leaves[1].T).log_softmax(-1).gather(1, targets[:, None]).sum().backward()
    for rounded, least, most in ((False, 0, 5e-5), (True, 1e-3, 0.1)):
        ours = [x.clone().requires_grad_() for x in (hidden, weight)]
        logprobs, _ = token_logprobs(*ours, targets, 1.0, chunk_tokens=256, compile=compile, round_logits=rounded)
        assert least <= (logprobs - expected).abs().mean() < most
        logprobs.sum().backward()
        for a, b in zip(ours, leaves, strict=True):
            assert (a.grad - b.grad).norm() < (0.05 if rounded else 0.01) * b.grad.norm()


def test_a_model_rounds_its_logits_only_when_it_is_told_to(folder):
    """Attention and products repeat, so nothing else differs."""
    ((row,),) = pack(samples(), 640, 1, 640)
    with torch.no_grad():
        exact, again, rounded = (
            build(folder, "bfloat16", False, logits_dtype=dtype)(Microbatch.of(row, DEVICE), 1.0)[0]
            for dtype in ("float32", "float32", "model")
        )
    assert torch.equal(exact, again) and 1e-5 < (rounded - exact).abs().mean() < 0.05


def test_compiled_blocks_serve_rows_with_any_number_of_documents(folder, monkeypatch):
    eager_logprobs = lambda *args, compile, **kwargs: token_logprobs(*args, **kwargs)  # noqa: E731
    monkeypatch.setattr(packed_model, "token_logprobs", eager_logprobs)  # the blocks' graphs alone are counted
    torch._dynamo.reset()
    model = build(folder, "bfloat16", compile=True)
    for i, batch in enumerate((samples()[:2], samples(), [], group(), group((1, 2, 3, 4)) + samples()[:3])):
        ((row,),) = pack(batch, 640, 1, 640)
        with torch._dynamo.config.patch(error_on_recompile=i > 0):
            model(Microbatch.of(row, DEVICE), 1.0)[0].sum().backward()


def test_a_row_of_padding_takes_little_memory_and_no_gradient(folder):
    """FlashAttention's backward takes memory for 128 tokens a document: documents of padding must be few."""
    model = build(folder, "bfloat16", compile=False)
    peaks = []
    for batch in ([PackedSample([1] * 100, [1] * 413, 1.0, 1.0, [0.0] * 413)] * 16, []):
        ((row,),) = pack(batch, 8192, 1, 8192)
        row = Microbatch.of(row, DEVICE)
        model.zero_grad()
        model(row, 1.0)[0].sum().backward()  # allocates what stays
        model.zero_grad()
        torch.cuda.reset_peak_memory_stats(DEVICE)
        before = torch.cuda.memory_allocated(DEVICE)
        model(row, 1.0)[0].sum().backward()
        peaks.append(torch.cuda.max_memory_allocated(DEVICE) - before)
    assert peaks[1] <= 1.5 * peaks[0]
    assert all(p.grad is None or not p.grad.to_local().any() for p in model.parameters())
