"""Whether a class of transformers computes the same on packed rows as document by document.

A tiny model of the same class, with a config of the same features, is computed both ways on the host: log-probabilities
and the gradient of every parameter. It takes about a second. What runs across documents (a convolution, a recurrent
state), scales its logits in its own way or attends by its own rule is found here, not in a run's results.
"""

import contextlib
import dataclasses
from collections.abc import Iterator
from itertools import accumulate

import torch
import transformers
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedConfig

from torchtitan.grpo.model.by_document import plain_functions
from torchtitan.grpo.model.documents import Documents
from torchtitan.grpo.model.families import BlockUses, Unsupported
from torchtitan.grpo.model.hf_model import PREFIX, TransformersModel, with_layers
from torchtitan.grpo.model.logprobs import token_logprobs

LENGTHS = (13, 1, 29, 7)
"""Tokens of the documents. The window of the tiny model is shorter than two of them."""
WINDOW = 8
VOCABULARY = 96
LOGPROBS_TOLERANCE, GRADIENTS_TOLERANCE = 1e-4, 2e-3
"""Largest difference of log-probabilities, in nats, and of a gradient, as a part of its largest value."""


_found: dict[str, BlockUses] = {}  # by config: it is asked for several times before a run starts


def block_uses(config: PreTrainedConfig) -> BlockUses:
    """What the blocks of this config do with packed rows.

    Raises:
        Unsupported: It is no dense causal language model of text, or is not the same on packed rows.
    """
    key = config.to_json_string(use_diff=False)
    if key not in _found:
        _found[key] = _checked(config)
    return _found[key]


def _checked(config: PreTrainedConfig) -> BlockUses:
    name = str((config.architectures or [config.model_type])[0])

    def refused(why: str) -> Unsupported:
        return Unsupported("architectures", [name], why)

    if config.sub_configs or config.get_text_config() is not config:
        raise refused("it has more than a language model; a folder of its text model alone trains")
    if config.is_encoder_decoder or getattr(config, "add_cross_attention", False):
        raise refused("it attends to an encoder")
    try:
        with torch.random.fork_rng(devices=[]), _quiet():
            torch.manual_seed(0)
            kinds = _kinds(config)
            uses, logprobs, gradients = _compare(_tiny(config, kinds))
    except Unsupported:
        raise
    except Exception as error:  # the class's own code raises anything
        said = str(error).strip().splitlines()
        raise refused(f"packed rows fail: {type(error).__name__}: {said[0] if said else 'no message'}") from error
    if not (logprobs <= LOGPROBS_TOLERANCE and gradients <= GRADIENTS_TOLERANCE):  # NaN too
        raise refused(
            f"packed rows differ from document by document, by {logprobs:.2g} nat and {gradients:.2g} of a gradient; "
            "a layer may run across documents"
        )
    of_kind = {kinds[block]: config.sliding_window if window else 0 for block, window in uses.windows.items()}
    windows = {block: of_kind[kind] for block, kind in enumerate(kinds) if kind in of_kind}
    return dataclasses.replace(uses, windows=windows)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without warnings about a config that is not the user's."""
    before = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers.logging.set_verbosity(before)


def _kinds(config: PreTrainedConfig) -> list[str]:
    """Of each block what kind it is: its modules, and what the config has in lists of an entry for each block.

    Raises:
        Unsupported: The model is no dense one with an output layer of one matrix.
    """
    with torch.device("meta"):
        model = TransformersModel(config)
    name, output = type(model.hf).__name__, model.output
    if any("expert" in parameter for parameter, _ in model.named_parameters()):
        raise Unsupported("architectures", [name], "of mixtures of experts only Qwen3MoeForCausalLM trains here")
    if not isinstance(output, nn.Linear) or output.bias is not None or output is not getattr(model.hf, "lm_head", None):
        raise Unsupported("architectures", [name], "its output layer is not one matrix with the name lm_head")
    if len(model.layers) != config.num_hidden_layers:
        why = f"its blocks are a list of {len(model.layers)}, which runs more than once"
        raise Unsupported("num_hidden_layers", config.num_hidden_layers, why)
    lists = [
        value for value in config.to_dict().values() if isinstance(value, list) and len(value) == len(model.layers)
    ]
    return [str(kind) for kind in zip(map(str, model.layers), *lists, strict=True)]


def _tiny(config: PreTrainedConfig, kinds: list[str]) -> PreTrainedConfig:
    """A config of the same features: the first blocks, which have all kinds, narrow and with a short window."""
    blocks = next(n for n in range(1, len(kinds) + 1) if set(kinds[:n]) == set(kinds))
    values = with_layers(config, min(len(kinds), max(2, blocks))).to_dict()
    heads, kv_heads = config.num_attention_heads, values.get("num_key_value_heads") or config.num_attention_heads
    few = min(2, kv_heads)
    values["num_attention_heads"] = few * min(2, max(1, heads // kv_heads))
    width = values.get("head_dim") or config.hidden_size // heads
    values["hidden_size"] = values["num_attention_heads"] * width
    for key, value in values.items():
        if not isinstance(value, int) or isinstance(value, bool):
            continue
        if "key_value_heads" in key:
            values[key] = few
        elif key.startswith("vocab_size"):
            values[key] = VOCABULARY
        elif key == "intermediate_size":
            values[key] = 64
        elif key == "sliding_window":
            values[key] = WINDOW
        elif key.endswith("chunk_size"):  # of a recurrent state; any gives the same values
            values[key] = 16
    values |= {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None, "tie_word_embeddings": False}
    return type(config).from_dict(values)


def _compare(config: PreTrainedConfig) -> tuple[BlockUses, float, float]:
    """What the blocks do, and the largest differences of log-probabilities and gradients."""
    with torch.device("meta"):
        packed = TransformersModel(config)
    uses = BlockUses(by_document=packed.by_document)
    packed.to_empty(device="cpu")
    with torch.no_grad():
        packed.init_weights()
        for parameter in packed.parameters():  # far from the small values of a new model, which hide differences
            if parameter.dim() > 1:
                parameter.normal_(std=parameter[0].numel() ** -0.5)
            else:
                parameter.normal_(mean=1.0, std=0.1)
    packed.float().train()
    apart = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
    apart.load_state_dict({name.removeprefix(PREFIX): p for name, p in packed.named_parameters()}, strict=False)
    packed.load_state_dict({PREFIX + name: buffer for name, buffer in apart.named_buffers()}, strict=False)
    apart.train()

    documents = [torch.randint(3, VOCABULARY, (length,)) for length in LENGTHS]
    documents[2][:5] = documents[0][:5]
    weights = torch.randn(sum(LENGTHS) - len(LENGTHS))
    found = _packed_logprobs(packed, documents, uses)
    with plain_functions(type(apart)):
        expected = torch.cat([_logprobs_apart(apart, document) for document in documents])
    gradients = _gradients(found, weights, packed), _gradients(expected, weights, apart)
    # A bias of keys has no gradient but rounding, so a part of the largest gradient counts as one.
    rounding = 1e-4 * max(gradient.abs().max() for gradient in gradients[1])
    worst = max(
        (ours - theirs).abs().max() / (theirs.abs().max() + rounding) for ours, theirs in zip(*gradients, strict=True)
    )
    return uses, (found - expected).abs().max().item(), worst.item()


def _packed_logprobs(model: TransformersModel, documents: list[Tensor], uses: BlockUses) -> Tensor:
    lengths = [len(document) for document in documents]
    starts = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
    bounds = Documents(starts, starts, max(lengths), max(lengths)).with_padded()
    positions = torch.cat([torch.arange(length) for length in lengths])
    states = model.final_states(torch.cat(documents), positions, bounds, uses=uses)[0]
    ends = starts[1:].long() - 1
    predicts = torch.ones(len(positions), dtype=torch.bool).index_fill(0, ends, False)
    targets = torch.cat([document[1:] for document in documents])
    weight, scale = model.output.weight, 1 / model.logit_scale
    return token_logprobs(states[predicts], weight, targets, scale, softcap=model.logit_softcap)[0]


def _logprobs_apart(model: nn.Module, document: Tensor) -> Tensor:
    logits = model(input_ids=document[None], use_cache=False).logits[0, :-1].float()
    return torch.log_softmax(logits, -1).gather(1, document[1:, None])[:, 0]


def _gradients(logprobs: Tensor, weights: Tensor, model: nn.Module) -> list[Tensor]:
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    found = torch.autograd.grad((logprobs * weights).sum(), parameters, allow_unused=True)
    pairs = zip(found, parameters, strict=True)
    return [torch.zeros_like(parameter) if gradient is None else gradient for gradient, parameter in pairs]
