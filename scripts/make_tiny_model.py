"""Write a model folder: config, character tokenizer, generation config and, with --weights, random weights.

    python scripts/make_tiny_model.py train_configs/tiny_qwen3     # the quickstart's folder

The defaults are small enough for a CPU. Hugging Face's loaders, vLLM, SGLang and this trainer read the folder.
"""

import argparse
import json
import string
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, processors
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    LlamaConfig,
    PretrainedConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

SPECIAL_TOKENS = ["<pad>", "<bos>", "<eos>", "<unk>"]
PAD, BOS, EOS, UNK = range(len(SPECIAL_TOKENS))
CHARACTERS = string.digits + "+-*=/()<>.,?!:#$%' \n" + string.ascii_lowercase + "QAWS"
# A system message ends with a newline, an answer with the end token. A question stays as it is.
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}"
    "{% elif message['role'] == 'system' %}{{ '\\n' }}{% endif %}{% endfor %}"
)


def character_tokenizer() -> Tokenizer:
    """One token per character (byte-pair encoding without merges), with `<bos>` before a text."""
    vocabulary = {token: i for i, token in enumerate([*SPECIAL_TOKENS, *CHARACTERS])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token=SPECIAL_TOKENS[UNK]))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", BOS)])
    tokenizer.add_special_tokens(SPECIAL_TOKENS)
    return tokenizer


def write_tokenizer(folder: Path, max_tokens: int) -> int:
    """Write tokenizer.json and tokenizer_config.json. Returns the number of tokens."""
    tokenizer = character_tokenizer()
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_tokens,
        "clean_up_tokenization_spaces": False,
        "pad_token": SPECIAL_TOKENS[PAD],
        "bos_token": SPECIAL_TOKENS[BOS],
        "eos_token": SPECIAL_TOKENS[EOS],
        "unk_token": SPECIAL_TOKENS[UNK],
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    return tokenizer.get_vocab_size()


def model_config(args: argparse.Namespace, vocab_size: int) -> PretrainedConfig:
    config_class, architecture = {
        "qwen3": (Qwen3Config, "Qwen3ForCausalLM"),
        "qwen3_moe": (Qwen3MoeConfig, "Qwen3MoeForCausalLM"),
        "llama3": (LlamaConfig, "LlamaForCausalLM"),
    }[args.family]
    experts = {}
    if args.family == "qwen3_moe":
        experts = {"num_experts": args.experts, "num_experts_per_tok": args.experts_per_token}
        experts |= {"moe_intermediate_size": args.expert_width or args.dim, "norm_topk_prob": True}
    return config_class(
        architectures=[architecture],
        vocab_size=vocab_size,
        hidden_size=args.dim,
        intermediate_size=args.ffn_dim,
        num_hidden_layers=args.layers,
        num_attention_heads=args.heads,
        num_key_value_heads=args.kv_heads,
        head_dim=args.head_dim,
        max_position_embeddings=args.max_tokens,
        tie_word_embeddings=args.tie,
        pad_token_id=PAD,
        bos_token_id=BOS,
        eos_token_id=EOS,
        dtype="float32",
        **experts,
    )


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument(
        "--family", choices=["qwen3", "qwen3_moe", "llama3"], help="default: qwen3; with --experts qwen3_moe"
    )
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--dim", type=int, default=128, help="hidden size")
    parser.add_argument("--ffn-dim", type=int, help="MLP width (default: 3 x dim)")
    parser.add_argument("--experts", type=int, help="of each layer of a mixture of experts (default: 8)")
    parser.add_argument("--experts-per-token", type=int, default=2)
    parser.add_argument("--expert-width", type=int, help="width of an expert (default: dim)")
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--kv-heads", type=int, default=2)
    parser.add_argument("--head-dim", type=int, help="width of a head (default: dim / heads)")
    parser.add_argument(
        "--vocab-size", type=int, help="rows of the embedding (default: the tokenizer's, to a multiple of 8)"
    )
    parser.add_argument("--max-tokens", type=int, default=512, help="longest sequence")
    parser.add_argument("--tie", action=argparse.BooleanOptionalAction, default=True, help="share embedding and head")
    parser.add_argument("--weights", action="store_true", help="also write random weights as safetensors")
    args = parser.parse_args(argv)
    args.family = args.family or ("qwen3_moe" if args.experts else "qwen3")
    args.experts = args.experts or 8
    args.ffn_dim = args.ffn_dim or 3 * args.dim
    args.head_dim = args.head_dim or args.dim // args.heads

    args.folder.mkdir(parents=True, exist_ok=True)
    tokens = write_tokenizer(args.folder, args.max_tokens)
    config = model_config(args, args.vocab_size or (tokens + 7) // 8 * 8)
    if config.vocab_size < tokens:
        parser.error(f"--vocab-size {config.vocab_size} is under the tokenizer's {tokens} tokens")
    if args.weights:
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config).save_pretrained(args.folder)
        weights = args.folder / "model.safetensors"
        weights.chmod((args.folder / "config.json").stat().st_mode & 0o777)  # it is the owner's alone
    config.save_pretrained(args.folder)
    GenerationConfig(pad_token_id=PAD, bos_token_id=BOS, eos_token_id=[EOS]).save_pretrained(args.folder)


if __name__ == "__main__":
    main()
