"""Scoring: the built-in functions, and reward functions that hang, raise or crash."""

import functools
import os
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from threading import Thread

import pytest

from tests.helpers import ROOT
from torchtitan.grpo.config.job_config import Data, Distill, Reward, Rollout
from torchtitan.grpo.data.rows import load_rows
from torchtitan.grpo.data.samples import Prompt, Sample
from torchtitan.grpo.errors import UserError
from torchtitan.grpo.reporting.estimates import majority
from torchtitan.grpo.rewards import process
from torchtitan.grpo.rewards.functions import exact_match, numeric_match
from torchtitan.grpo.rewards.runner import RewardRunner
from torchtitan.grpo.sources.table import _literal

FUNCTIONS = """
import asyncio
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time

at_import = set(os.environ)
with open("/proc/self/environ") as file:
    at_start = file.read()

def length(text, prompt):
    return len(text)

def spaces(text, prompt):
    return text.count(" ")

def hang(text, prompt):
    if text == "hang":
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGALRM})
        time.sleep(600)
    return 1.0

def runs_program(text, prompt):
    with subprocess.Popen(["sleep", "600"]) as program:
        with open(prompt.columns["log"], "w") as log:
            log.write(f"{program.pid} ")
        re.match("(a*)*b", "a" * 60)  # holds the interpreter
    return 1.0

def leaves_program(text, prompt):
    program = subprocess.Popen(["sh", "-c", "echo from a program; exec sleep 600"])
    with open(prompt.columns["log"], "w") as log:
        log.write(f"{program.pid} ")
    print("from the function", text, flush=True)
    if text == "crash":
        os._exit(7)
    return 1.0

def check(queue, text):
    queue.put(eval(text))

def with_processes(text, prompt):
    score = 0.0
    for method in ("fork", "spawn"):
        context = multiprocessing.get_context(method)
        queue = context.Queue()
        process = context.Process(target=check, args=(queue, text))
        process.start()
        process.join(0.5 if "sleep" in text else 20)
        if process.is_alive():
            process.terminate()
            process.join()
            continue
        score += queue.get()
    with multiprocessing.get_context("fork").Pool(2) as pool:
        return score + sum(pool.map(abs, [-1, -2]))

def raises(text, prompt):
    if text == "raise":
        raise KeyError("no such thing")
    return 1.0

def crash(text, prompt):
    if text == "crash":
        os._exit(7)
    return 1.0

def exits(text, prompt):
    if text == "exit":
        sys.exit(3)
    return 1.0

def odd(text, prompt):
    if text == "array":
        import numpy
        return numpy.ones(2)
    odd = {"nan": float("nan"), "inf": float("inf"), "none": None, "text": "1.0", "list": [1.0], "true": True}
    return odd.get(text, 10**400)

def counted(text, prompt):
    with open(prompt.columns["log"], "a") as log:
        log.write(text + "\\n")
    if text == "crash":
        os._exit(7)
    return 1.0

def modules(text, prompt):
    heavy = {"pytest", "torch", "numpy"} & set(sys.modules)
    return float(bool(heavy) or hasattr(sys.modules["__main__"], "__file__"))

def sees(text, prompt):
    in_shell = subprocess.run("env", capture_output=True, text=True).stdout
    return sum(float(text in each) for each in (os.environ, in_shell, at_import, at_start))

started, all_started, loops = 0, asyncio.Event(), set()

async def together(text, prompt):
    global started
    started += 1
    if started == 8:
        all_started.set()
    await all_started.wait()
    return 1.0

async def slow(text, prompt):
    await asyncio.sleep(600 if text == "slow" else 0)
    return 1.0 / len(text)

async def stops_others(text, prompt):
    await asyncio.sleep(0)
    if text == "block":
        time.sleep(600)
    if text == "crash":
        os._exit(7)
    loops.add(asyncio.get_running_loop())
    return len(loops)

class Silent(ValueError):
    def __str__(self):
        raise self
    __repr__ = __str__

def sizes(answers, prompt):
    return [{"skip": None, "silent": Silent()}.get(text, len(answers)) for text in answers]

def own_column(text, prompt):
    return "_thread.lock" in prompt.columns["own"] and list(prompt.columns) == ["log", "own", "deep", "circle"]

class Table:
    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return self.rows

    def __iter__(self):
        return iter(["score"])

def table(answers, prompt):
    return Table(len(answers))

async def sizes_awaited(answers, prompt):
    await asyncio.sleep(1.5 if "slow" in answers else 0)
    return [len(answers) for _ in answers]

def one_argument(text):
    return 1.0

def processes_cuda(text, prompt):
    import torch
    return float(torch.cuda.is_initialized())
"""


@pytest.fixture
def functions(tmp_path, monkeypatch):
    (tmp_path / "my_rewards.py").write_text(FUNCTIONS)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield "my_rewards"
    sys.modules.pop("my_rewards", None)


def make_samples(*texts, answer="42", columns=None):
    prompt = Prompt(0, [1], "?", answer, columns or {})
    return [Sample(prompt, [1], [0.0], [0], "stop", text=text) for text in texts]


def test_a_prompt_is_scored_by_the_functions_that_it_names(functions):
    reward = Reward(functions=["exact_match", f"{functions}:length", f"{functions}:spaces"], weights=[1.0, 10.0, 100.0])
    own = {"all": (), "one": (f"{functions}:length",), "two": (f"{functions}:spaces", "exact_match")}
    samples = [Sample(Prompt(i, [1], "?", "a b", {}, "", own[name]), [1], [0.0], [0], "stop", text="a b")
               for i, name in enumerate(own)]  # fmt: skip
    with RewardRunner(reward) as runner:
        runner.score(samples)
    assert [set(sample.rewards) for sample in samples] == [set(reward.functions), *map(set, list(own.values())[1:])]
    assert [sample.reward for sample in samples] == [131.0, 30.0, 101.0]


def test_exact_match_ignores_space_around_only():
    prompt = Prompt(0, [1], "?", "4 2")
    assert [exact_match(text, prompt) for text in (" 4 2\n", "42", "4 2.")] == [1.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("text", "reference", "score"),
    [
        ("It is $1,234.50.", "1234.5", 1.0),
        ("first 1, then 42", "42.0", 1.0),
        ("x = 3-5", "5", 1.0),
        ("x = -5", "5", 0.0),
        ("\N{MINUS SIGN}5", "-5", 1.0),
        ("1e3", "1,000", 1.0),
        ("100000000000000001", "100000000000000000", 0.0),
        ("none", "5", 0.0),
        ("", "5", 0.0),
        ("-$5", "-5", 1.0),
        ("-$5", "5", 0.0),
        ("-\\$5", "$-5", 1.0),
        ("3/2", "1/2", 0.0),
        ("3 / 2", "1.5", 1.0),
        ("1.5", "6/4", 1.0),
        ("1 1/2", "1.5", 1.0),
        ("-1\\frac{1}{2}", "-1.5", 1.0),
        ("\\dfrac32", "2", 0.0),
        ("1{,}234", "1234", 1.0),
        ("10,080", "10,\\!080", 1.0),
        ("5/0", "5", 0.0),
        ("1e999999999", "5", 0.0),
        ("1e" + "9" * 50, "5", 0.0),
        ("9" * 100000, "5", 0.0),
        ("1 " * 100000 + "5", "5", 1.0),
        ("25 cm^2", "25", 1.0),
        (r"\boxed{25 \text{ m}^3}", "25", 1.0),
        ("72 [1]", "72", 1.0),
        ("72 apples.[1][2]", "72", 1.0),
        ("The value of 3 is [5]", "5", 1.0),
        ("Result. [5]", "5", 1.0),
        (r"So \boxed{72}. That took 3 steps", "72", 1.0),
        (r"It goes into \boxed{answer}. 72", "72", 1.0),
        (r"\boxed{72", "72", 1.0),
        ("#### 72\nThat took 3 steps", "72", 1.0),
        ("#### Step 2\nso 72", "72", 1.0),
        ("#### 3. Result\nso 72", "72", 1.0),
        ("\\boxed{3}\n#### 72", "72", 1.0),
        ("#### 3\n\\boxed{72}", "72", 1.0),
        ("7 cm^2", "2", 0.0),
        (r"\frac{a}{2}", "2", 0.0),
        (r"\frac{\sqrt{3}}{2}", "2", 0.0),
        (r"\pi/2", "2", 0.0),
        (r"\frac\pi2", "2", 0.0),
        ("x_2", "2", 0.0),
        (r"72 = x_{12}", "72", 1.0),
        ("7 m^{-2}", "7", 1.0),
        ("H2O", "2", 0.0),
        ("_72_", "72", 1.0),
        (r"\approx72", "72", 1.0),
        ("x-5", "-5", 1.0),
        ("10 000", "10000", 1.0),
        ("10\N{THIN SPACE}000.5", "10,000.5", 1.0),
        (r"10\,000", "10000", 1.0),
        ("2020 100", "100", 1.0),
        ("\N{EN DASH}5", "-5", 1.0),
        ("pages 3\N{EN DASH}5", "5", 1.0),
        (r"6.02 \times 10^{23}", "6.02e23", 1.0),
        (r"6.02 \times 10^{23}", r"1.5 \times 10^{9}", 0.0),
        (r"\boxed{6.02 \cdot 10^{-3}}", "0.00602", 1.0),
        (r"\boxed{- 5}", "-5", 1.0),
        ("#### - 5\nas it was asked", "-5", 1.0),
        (r"so $x = -\ \frac{1}{2}$", "-1/2", 1.0),
        ("they have =\n- 5 apples", "5", 1.0),
        ("what is left = 10 - 5", "5", 1.0),
        (r"\boxed{0.\overline{3}}", "3", 0.0),
        (r"it is $0.\dot{3}$", "3", 0.0),
        (r"\boxed{\overline{45}}", "45", 1.0),
        ("about 1.5 x 10^9 stars", "1500000000", 1.0),
        (r"3/2\,\times\,10^{2}", "150", 1.0),
        (r"\boxed{10^{6}}", "10", 0.0),
        ("10^6", "1000000", 1.0),
        ("2^{10}", "2", 0.0),
        ("2^(10)", "1024", 1.0),
        ("-10^-2", "-0.01", 1.0),
        ("0^-1", "0", 0.0),
        ("9^999999", "9", 0.0),
        ("2^n", "2", 0.0),
        (r"90^\circ", "90", 1.0),
        ("5^{th}", "5", 1.0),
        ("#### 1 - Compute\nThe total is 72", "72", 1.0),
        ("#### 1.Compute\nThe total is 72", "72", 1.0),
        ("#### 2nd step\nThe total is 72", "72", 1.0),
        ("#### 第3步 计算总数\n一共72个。", "72", 1.0),
        ("#### Шаг 3\nвсе 72", "72", 1.0),  # noqa: RUF001
        ("#### **-$1,072.50**\nThat took 3 steps", "-1072.5", 1.0),
        ("#### 25 \\text{ m}^3\nThat took 3 steps", "25", 1.0),
        ("#### 72 %\nThat took 3 steps", "72", 1.0),
        ("#### The answer is 72\n", "72", 1.0),
        ("In 3 steps we get $[5]$", "5", 1.0),
        ("After 4 days (half). [72]", "72", 1.0),
        ("Day 1. [72]", "72", 1.0),
        ("72.[1]", "72", 1.0),
        ("$72$ [1]", "72", 1.0),
        ("USD72", "72", 1.0),
        ("-INR72, not EUR5 but Rs.72", "72", 1.0),
        ("x2", "2", 0.0),
        ("1_000", "1000", 1.0),
        (r"5\ 000", "5000", 1.0),
        ("5~000", "5000", 1.0),
        (r"\boxed{3\sqrt{2}}", "2", 0.0),
        (r"$3\sqrt[3]{2}$", "3", 0.0),
        (r"1 + \boxed{2 + \sqrt 3}", "2", 0.0),
        (r"\boxed{\sqrt{2} \approx 1.41}", "1.41", 1.0),
        (r"\boxed{2x+3}", "3", 0.0),
        (r"\boxed{2\pi}", "2", 0.0),
        ("#### 2x + 3", "3", 0.0),
        (r"\boxed{x + 3 = 5}", "5", 1.0),
        (r"\boxed{5 = x}", "5", 1.0),
        (r"\boxed{x \ge 5}", "5", 1.0),
        (r"\boxed{9.8\,\text{m/s}^2}", "9.8", 1.0),
        (r"\boxed{60 km/h}", "60", 1.0),
        (r"\boxed{2e-3}", "0.002", 1.0),
        (r"\boxed{6.02 x 10^{23}}", "6.02e23", 1.0),
        ("10 000 apples", "10000", 1.0),
        ("1 234 567 apples", "1234567", 1.0),
        ("It is 1 234.", "1234", 1.0),
        (r"\boxed{1 234 \text{ apples}}", "1234", 1.0),
        ("10 20 300", "300", 1.0),
        ("5 200 g bags", "200", 1.0),
        ("-98 952 dollars", "-98952", 1.0),
        ("a loss of -\\$98 952 in May", "-98952", 1.0),
        ("10 -5 200 g bags", "200", 1.0),
        ("x-5 200 g bags", "200", 1.0),
    ],
    ids=lambda value: str(value)[:20],
)
def test_numeric_match_compares_the_last_number(text, reference, score):
    assert numeric_match(text, Prompt(0, [1], "?", reference)) == score


@pytest.mark.parametrize("part", ["1 111 ", "1[1,", r"\frac{", r"\frac{1}", "{}", "a_", "^(", "####1", r"\boxed{",
                                  "1^", "2^3", "1*10^", r"\sqrt[", r"3\sqrt", "1 000 ", "1_000", "[1] ", "#### 1a",
                                  "1a/", r"\text", r"\text{", "$ ", "x +", " ", "USD", " = "])  # fmt: skip
@pytest.mark.parametrize("place", ["%s", r"\boxed{%s", "#### %s\nx", r"\sqrt%s"])
def test_numeric_match_takes_time_by_the_length_of_an_answer(part, place):
    def seconds(length):
        start = time.thread_time()
        numeric_match(place % (part * (length // len(part)) + "x"), Prompt(0, [1], "?", "5"))
        return time.thread_time() - start

    assert seconds(40_000) < 0.1 + 8 * seconds(10_000)


def test_built_in_functions_refuse_a_prompt_without_reference():
    with pytest.raises(ValueError, match=r"\[data\] answer_column"):
        exact_match("", Prompt(0, [1], "?"))
    for reference in ("one", "1/0", "1e999999999"):
        with pytest.raises(ValueError, match="holds no number"):
            numeric_match("1", Prompt(0, [1], "?", reference))


MATH_REFERENCES = {
    r"2\sqrt{3}": ["2", "3"],
    r"-2 + 7i": ["-2", "2", "7"],
    r"2k+2": ["2"],
    r"\left( 3, \frac{\pi}{2} \right)": ["3", "2"],
    r"y = 2x + 3": ["2", "3"],
    r"\frac{11}{36}": ["11", "36"],
    r"-\frac{3}{4}": ["3", "4", r"\frac{3}{4}"],
    r"3\frac{1}{2}": ["3", "1", r"\frac{1}{2}"],
    r"\frac14": ["1", "4", "14"],
    r"\frac{3}{2}\pi": ["3", "2", r"\frac{3}{2}"],
    r"[-2,7]": ["-2", "7", "(-2,7)"],
    r"(-\infty, 5)": ["5"],
    r"(-\infty,-2)\cup(3,\infty)": ["-2", "3"],
    r"-5 \le x \le 3": ["-5", "3"],
    r"\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}": ["1", "4", r"\begin{pmatrix} 1 & 2 \\ 4 & 3 \end{pmatrix}"],
    "\\begin{pmatrix} -1/3 \\\\\n 2/3 \\end{pmatrix}": ["2/3", "3"],
    r"\{1, 2, 3\}": ["1", "3"],
    r"1, -2": ["1", "-2"],
    r"3 \pm 2 \sqrt{2}": ["2", "3"],
    r"90^\circ": ["9", "180"],
    r"50\%": ["5"],
    r"\text{Evelyn}": [r"\text{Bob}", "3"],
    r"\text{(C)}": [r"\text{(B)}", "3"],
    r"10,080": ["10", "80"],
    r"1{,}234{,}567": ["1", "234", "567"],
    r"\$32{,}348": ["32", "348"],
    r"10\,000": ["10", "0", "10,001"],
    r"2^{10}": ["2", "10"],
    r"\log_2 5": ["2", "5"],
    r"11\sqrt2": ["11", "2"],
    r"5 \text{ cm}": ["2"],
    "5 cm": ["2"],
    "42": ["2", "4"],
    "-0.5": ["0.5", "5"],
    "1/2": ["1", "2"],
}
"""References as in the MATH data set and plain ones, and wrong answers to each."""


READ_AS_HALF = {
    "so $\\frac{2}{4}$": 1.0,
    r"\boxed{0.5}": 1.0,
    r"it is \frac{1}{2}": 1.0,
    "A: 0.5": 1.0,
    "#### 0.5": 1.0,
    "1 - 1/2 is 0.5.": 1.0,
    "0.5.": 1.0,
    "$(1,2)$": 0.0,
    r"it is 0.5\sqrt{3}": 0.0,
    "no idea": 0.0,
    "": 0.0,
}


def test_math_verify_reads_references_as_in_math():
    """The reference itself is right in every form. Its numbers alone are wrong."""
    pytest.importorskip("math_verify")
    forms = [r"So it is $\boxed{%s}$.", r"\boxed{%s}", "$%s$", "%s"]
    samples, scores = make_samples(*READ_AS_HALF, answer="1/2"), list(READ_AS_HALF.values())
    for reference, wrong in MATH_REFERENCES.items():
        texts = [form % answer for answer in (reference.replace("\n", ""), *wrong) for form in forms]
        samples += make_samples(*texts, answer=reference)
        scores += [1.0] * len(forms) + [0.0] * len(wrong) * len(forms)
    spaces = ("1 234 567", r"1\,234\,567", "1~234~567", "1\N{NARROW NO-BREAK SPACE}234\N{THIN SPACE}567")
    for number in (*spaces, r"1{,}234{,}567", r"1,\!234,\!567"):
        for reference, score in (("-1,234,567", 1.0), ("-1", 0.0), ("1,234,567", 0.0)):
            texts = [form % f"\N{MINUS SIGN}{number}" for form in (*forms, "Answer: %s")]
            samples += make_samples(*texts, answer=reference)
            scores += [score] * len(texts)
    for product, value in {"2^3 100": "800", r"2^3\,100": "800", "a_1 100": "100 a_1", r"a_1\,100": "100 a_1"}.items():
        samples += make_samples(*(form % product for form in forms[:3]), answer=value)
        samples += make_samples(f"${value}$", answer=product)
        scores += [1.0] * 4
    with RewardRunner(Reward(functions=["math_verify"], workers=1)) as runner:
        runner.score(samples)
        assert not runner.failures
    read = zip(samples, scores, strict=True)
    assert [(s.prompt.answer, s.text, s.reward) for s, score in read if s.reward != score] == []


@pytest.mark.parametrize(("timeout_s", "reason"), [(30.0, "TimeoutException"), (2.0, "timeout_seconds = 2.0")])
def test_math_that_takes_too_long_is_a_failure(timeout_s, reason, caplog):
    """The library's own alarm (5 s) ends it in the worker, or our limit ends the worker."""
    pytest.importorskip("math_verify")
    samples = make_samples("42", "$" + "+".join(["9^{9^{9^{9}}}"] * 3) + "$", "42")
    with RewardRunner(Reward(functions=["math_verify"], workers=1, timeout_seconds=timeout_s)) as runner:
        runner.score(samples)
    assert [sample.reward for sample in samples] == [1.0, None, 1.0]
    assert reason in samples[1].reward_failures["math_verify"]
    assert reason in caplog.text


def test_reasoning_gym_scores_by_the_tasks_own_scorer():
    """arc_agi's scorer needs tuples in its entry, which JSON would turn into lists."""
    reasoning_gym = pytest.importorskip("reasoning_gym")
    tasks = ["chain_sum", "arc_agi", "knights_knaves"]
    rows = load_rows(Data(source="reasoning_gym", source_args={"tasks": tasks, "size": 2}), False, 0)
    prompts = [Prompt(i, [1], row["question"], row["answer"], row) for i, row in enumerate(rows.rows)]
    right = [Sample(prompt, [1], [0.0], [0], "stop", text=prompt.answer) for prompt in prompts]
    wrong = [Sample(prompt, [1], [0.0], [0], "stop", text="nonsense") for prompt in prompts]
    with RewardRunner(Reward(functions=["reasoning_gym"], workers=1, timeout_seconds=30.0)) as runner:
        runner.score(right + wrong)
    assert [sample.reward for sample in right] == [1.0] * 6
    assert max(sample.reward for sample in wrong) < 0.5
    direct = reasoning_gym.create_dataset("arc_agi", size=2, seed=0)
    assert direct.score_answer(direct[0]["answer"], direct[0]) == right[1].reward
    assert _literal({"size": (1, 2), "own": Path}) == "{'size': [1, 2], 'own': \"<class 'pathlib.Path'>\"}"


def test_weights_names_and_whole_text_for_own_functions(functions):
    samples = make_samples("a b #### 41 #### 42", "#### 41", "42")
    names = ["exact_match", f"{functions}:length", f"{functions}:spaces"]
    reward = Reward(functions=names, weights=[1.0, 0.5, -1.0], answer_pattern=r"#### (\d+)", workers=1)
    with RewardRunner(reward) as runner:
        runner.score(samples)
    assert samples[0].rewards == dict(zip(names, [1.0, 19.0, 5.0], strict=True))
    assert samples[0].reward == 1.0 + 9.5 - 5.0
    assert samples[1].rewards["exact_match"] == 0.0
    assert samples[2].rewards["exact_match"] == 0.0, "an answer that the pattern does not find is no answer"


@pytest.mark.parametrize("functions", [["exact_match"], []], ids=["", "an environment's rewards"])
def test_a_final_answer_that_takes_too_long_to_find_costs_its_own_vote_only(functions):
    reward = Reward(functions=functions, answer_pattern=r"= *((?:\d|\d\d)+)$", workers=1, timeout_seconds=1.5)
    group = make_samples("1+1= 2", "=" + "1" * 80 + "!", "none", "unscored = 2", "=2")
    for sample, value in zip(group, (1.0, 1.0, 0.0, None, 1.0), strict=True):
        sample.reward = value
    with RewardRunner(reward) as runner:
        runner.find_finals(group)
    assert [sample.final for sample in group] == ["2", None, None, None, "2"]
    assert majority([sample for sample in group if sample.reward is not None], reward) == 1.0


def test_a_random_reward_does_not_depend_on_what_was_scored_before(tmp_path, monkeypatch):
    """So a resumed run repeats it."""
    text = "import random\nimport numpy\ndef noise(text, prompt): return random.random() + 2 * numpy.random.random()\n"
    (tmp_path / "noisy_rewards.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    scores = []
    for order, workers in (("abcd", 1), ("dcbda", 2)):
        samples = make_samples(*order)
        with RewardRunner(Reward(functions=["noisy_rewards:noise"], workers=workers)) as runner:
            runner.score(samples)
        scores.append({sample.text: sample.reward for sample in samples})
    assert scores[0] == scores[1] and len(set(scores[0].values())) == 4


def test_a_worker_that_an_earlier_call_has_left_frozen_reads_no_calls_and_is_replaced(tmp_path, monkeypatch):
    """Its pipe takes only so much."""
    text = "import os, signal, threading\n"
    text += "def freezes(text, prompt):\n    if text == 'freeze':\n"
    text += "        threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGSTOP)).start()\n    return 1.0\n"
    (tmp_path / "freezing_rewards.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    reward = Reward(functions=["freezing_rewards:freezes"], workers=1, timeout_seconds=1.0)
    monkeypatch.setattr("threading.Timer", None)  # no thread for each message
    with RewardRunner(reward) as runner:
        runner.score(make_samples("freeze"))
        time.sleep(0.3)
        samples = make_samples(*("a" * 100_000 for _ in range(16)))
        began = time.monotonic()
        runner.score(samples)
        assert time.monotonic() - began < 30
    assert [sample.reward for sample in samples].count(1.0) >= 15


@pytest.mark.parametrize("then", ["os._exit(7)", "time.sleep(600)"])
def test_a_message_that_breaks_off_costs_its_own_score(tmp_path, monkeypatch, then):
    """As one of a worker that is killed or frozen while it sends."""
    (tmp_path / "torn_rewards.py").write_text(
        "import os, struct, time\n"
        "def tears(text, prompt):\n"
        "    if text == 'tear':\n"
        "        pipe = next(fd for fd in range(3, 99) if os.readlink(f'/proc/self/fd/{fd}').startswith('socket'))\n"
        "        os.write(pipe, struct.pack('!i', 99) + b'...')\n"
        f"        {then}\n"
        "    return 1.0\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "torn_rewards", raising=False)
    monkeypatch.setattr(process, "GRACE_S", 0.0)
    samples = make_samples("a", "tear", "b")
    with RewardRunner(Reward(functions=["torn_rewards:tears"], workers=1, timeout_seconds=1.0)) as runner:
        thread = Thread(target=runner.score, args=(samples,), daemon=True)
        thread.start()
        thread.join(20)
    assert [sample.reward for sample in samples] == [1.0, None, 1.0]


def test_hang_costs_its_own_limit_and_no_other_score(functions):
    hang = f"{functions}:hang"
    samples = make_samples("a", "hang", "b", "hang", "c")
    with RewardRunner(Reward(functions=[hang, "exact_match"], workers=1, timeout_seconds=1.0)) as runner:
        start = time.monotonic()
        runner.score(samples)
        assert 2.0 <= time.monotonic() - start < 200.0  # two limits and three processes; a sleep alone is 600 s
        assert runner.failures == {hang: 2}
        again = make_samples("42")
        runner.score(again)
    assert [sample.reward for sample in samples] == [1.0, None, 1.0, None, 1.0]
    assert [sample.rewards for sample in samples[:2]] == [{hang: 1.0, "exact_match": 0.0}, {"exact_match": 0.0}]
    why = {hang: "took longer than [reward] timeout_seconds = 1.0"}
    assert [sample.reward_failures for sample in samples] == [{}, why, {}, why, {}]
    assert again[0].reward == 2.0


@pytest.mark.parametrize(("name", "text"), [("raises", "raise"), ("crash", "crash"), ("exits", "exit")])
def test_failure_is_recorded_and_the_rest_is_scored(functions, name, text, caplog):
    samples = make_samples(*["a", text, "b"] * 2)
    with RewardRunner(Reward(functions=[f"{functions}:{name}"], workers=1)) as runner:
        runner.score(samples)
        assert runner.failures == {f"{functions}:{name}": 2}
    assert [sample.reward for sample in samples] == [1.0, None, 1.0] * 2
    reason = {"raises": "KeyError: 'no such thing'", "crash": "exit code 7", "exits": "SystemExit: 3"}[name]
    assert reason in samples[1].reward_failures[f"{functions}:{name}"]
    assert f"{functions}:{name}" in caplog.text and reason in caplog.text
    assert caplog.text.count("failed") == 1, "the second failure must not flood the log"


def test_results_that_are_no_finite_number_are_failures(functions):
    texts = ["nan", "inf", "none", "text", "list", "array", "too large", "true"]
    samples = make_samples(*texts)
    with RewardRunner(Reward(functions=[f"{functions}:odd"], workers=1)) as runner:
        runner.score(samples)
    assert [sample.reward for sample in samples] == [None] * 7 + [1.0]
    reasons = [sample.reward_failures.get(f"{functions}:odd", "") for sample in samples]
    assert ["one finite number on every path" in reason for reason in reasons] == [True] * 7 + [False]


def test_a_weighted_sum_that_overflows_float32_is_a_failure_of_its_largest_part(functions, caplog):
    samples = make_samples("a" * 3, " ", "a" * 30)
    names = [f"{functions}:length", f"{functions}:spaces", "exact_match"]
    with RewardRunner(Reward(functions=names, weights=[1e37, -1e308, 2.0], workers=1)) as runner:
        runner.score(samples)
        assert runner.failures == {names[0]: 1, names[1]: 1}
    assert [sample.reward for sample in samples] == [3 * 1e37, None, None]
    assert [list(sample.reward_failures) for sample in samples] == [[], [names[1]], [names[0]]]
    assert names[0] not in samples[2].rewards and "returned 30, which with its weight 1e+37" in caplog.text


def test_coroutines_are_awaited_together(functions):
    """Each waits until all eight have begun."""
    with RewardRunner(Reward(functions=[f"{functions}:together"], workers=2)) as runner:
        samples = make_samples(*"abcdefgh")
        runner.score(samples)
    assert [sample.reward for sample in samples] == [1.0] * 8


def test_a_coroutine_that_takes_too_long_costs_its_own_limit(functions):
    slow = f"{functions}:slow"
    samples = make_samples("a", "slow", "bb", "", "slow")
    with RewardRunner(Reward(functions=[slow], workers=1, timeout_seconds=0.5)) as runner:
        runner.score(samples)
    assert [sample.reward for sample in samples] == [1.0, None, 0.5, None, None]
    why = {sample.text: sample.reward_failures.get(slow, "") for sample in samples}
    assert why["slow"] == "took longer than [reward] timeout_seconds = 0.5"
    assert why[""].startswith("raised ZeroDivisionError: ") and f"{functions}.py:" in why[""]


def test_a_coroutine_that_blocks_or_ends_the_process_costs_no_other_score(functions, monkeypatch):
    monkeypatch.setattr("torchtitan.grpo.rewards.process.GRACE_S", 0.5)
    name = f"{functions}:stops_others"
    samples = make_samples("a", "block", "b", "crash", "c")
    with RewardRunner(Reward(functions=[name, "exact_match"], workers=1, timeout_seconds=0.5)) as runner:
        runner.score(samples)
        assert runner.failures == {name: 2}
        runner.score(again := make_samples("a", "b"))
    assert [sample.reward for sample in samples] == [1.0, None, 1.0, None, 1.0]
    assert samples[1].reward_failures[name].endswith("timeout_seconds = 0.5, and did not await")
    assert samples[3].reward_failures[name] == "ended its process with exit code 7"
    assert [sample.reward for sample in again] == [1.0, 1.0], "one event loop: a client may keep its connections"


def test_a_function_may_score_a_groups_answers_at_once(functions):
    names = [f"{functions}:sizes", "exact_match", f"{functions}:sizes_awaited"]
    samples, others = make_samples("a", "b", "42"), make_samples("c", "skip", "slow", "d", "silent")
    samples[1].prompt = replace(samples[1].prompt, token_ids=[2, 1], text="of a conversation of its own ?")
    with RewardRunner(Reward(functions=names, weights=[1.0, 100.0, 10.0], workers=2, timeout_seconds=1.0)) as runner:
        runner.score(samples)
        runner.score(others)  # it has 5 times 1 s
    assert [sample.reward for sample in samples] == [33.0, 33.0, 133.0]
    assert [sample.reward for sample in others] == [55.0, None, 55.0, 55.0, None]
    assert others[1].reward_failures[names[0]] == "returned None for this answer of a group, which leaves it out"


def test_objects_that_an_environment_keeps_in_a_prompt_are_texts_in_a_reward(functions):
    deep = functools.reduce(lambda inner, _: [inner], range(600), [])  # too much for pickle, and not for JSON
    circle: list = []
    circle.append(circle)
    own = {"own": threading.Lock(), (1, 2): "place", "deep": deep, "circle": circle}
    samples = make_samples("a", "b", columns={"log": "x"} | own)
    with RewardRunner(Reward(functions=[f"{functions}:own_column"], workers=1)) as runner:
        runner.score(samples)
    assert [sample.reward for sample in samples] == [1.0, 1.0]


def test_a_table_of_scores_is_a_failure_of_its_group(functions):
    with RewardRunner(Reward(functions=[f"{functions}:table"], workers=1)) as runner:
        runner.score(samples := make_samples("a", "b"))
    for sample in samples:
        assert "returned 1 scores for 2 answers" in sample.reward_failures[f"{functions}:table"]


def wait_until_gone(pid):
    deadline = time.monotonic() + 10
    while Path(f"/proc/{pid}").exists():
        assert time.monotonic() < deadline, f"process {pid} is left"
        time.sleep(0.02)


def test_programs_that_a_function_has_started_end_with_its_time(functions, tmp_path):
    log = tmp_path / "log"
    (sample,) = make_samples("x", columns={"log": str(log)})
    with RewardRunner(Reward(functions=[f"{functions}:runs_program"], workers=1, timeout_seconds=1.0)) as runner:
        runner.score([sample])
        assert sample.reward is None
        wait_until_gone(int(log.read_text()))


@pytest.mark.parametrize("text", ["crash", "killed while idle"])
def test_programs_of_a_worker_that_died_by_itself_end_with_the_run(functions, tmp_path, text):
    log = tmp_path / "log"
    (sample,) = make_samples(text, columns={"log": str(log)})
    with RewardRunner(Reward(functions=[f"{functions}:leaves_program"], workers=1)) as runner:
        runner.score([sample])
        if text != "crash":
            pid = runner._workers[0]._process.pid
            os.kill(pid, 9)
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    wait_until_gone(int(log.read_text()))


def test_a_function_may_use_multiprocessing(functions):
    """As those that run a model's program with a time limit do. A child that is terminated ends."""
    samples = make_samples("1 + 1", "time.sleep(600)")
    with RewardRunner(Reward(functions=[f"{functions}:with_processes"], workers=1, timeout_seconds=60.0)) as runner:
        runner.score(samples)
    assert [sample.reward for sample in samples] == [7.0, 3.0], samples[0].reward_failures


def test_output_is_in_a_file_of_the_run_and_bounded(functions, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(process, "LOG_WATCH_S", 0.05)
    monkeypatch.setattr(process, "LOG_BYTES", 50_000)
    monkeypatch.setattr(process, "KEPT_BYTES", 1000)
    caplog.set_level("INFO")
    names = [f"{functions}:leaves_program", "exact_match"]
    with RewardRunner(Reward(functions=names, workers=1), folder=str(tmp_path)) as runner:
        runner.score(make_samples("of", columns={"log": str(tmp_path / "log")}))
        log = tmp_path / "rewards.log"
        deadline = time.monotonic() + 20
        while "from a program" not in log.read_text() or str(log) not in caplog.text:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        assert "from the function of" in log.read_text()
        texts = [f"{i:01000}" for i in range(200)]
        runner.score(make_samples(*texts, columns={"log": str(tmp_path / "log")}))
        # A program that still writes may be first in the file that was just emptied.
        while log.stat().st_size > 50_000 or "... older output was dropped ...\n" not in log.read_text():
            assert time.monotonic() < deadline
            time.sleep(0.02)
        runner.score(again := make_samples("\udc80", columns={"log": str(tmp_path / "log")}))
        assert again[0].reward == 1.0 and "function \\udc80" in log.read_text()
    assert caplog.text.count("rewards.log") == 1


def test_output_on_a_full_disk_costs_no_score(functions, tmp_path):
    (tmp_path / "rewards.log").symlink_to("/dev/full")
    (sample,) = make_samples("x", columns={"log": str(tmp_path / "log")})
    reward = Reward(functions=[f"{functions}:leaves_program"], workers=1)
    with RewardRunner(reward, folder=str(tmp_path)) as runner:
        runner.score([sample])
    assert (sample.reward, sample.reward_failures) == (1.0, {})


STARTS_ONCE = """
import os
count = open({log!r}, "a+")
count.write("x")
count.flush()
if os.path.getsize({log!r}) {fails}:
    print("out of luck", flush=True)
    os._exit(3)

def score(text, prompt):
    if text == "crash":
        os._exit(7)
    return 1.0
"""


@pytest.mark.parametrize(("fails", "rewards"), [("in (3, 4)", [1.0, None, 1.0]), ("> 2", [1.0, None, None])])
def test_a_worker_that_does_not_start_again_costs_its_answers(tmp_path, monkeypatch, fails, rewards):
    """The trainer imports the module first, then the worker."""
    monkeypatch.setattr(process, "RESTART_PAUSES_S", (0.01,) * 3)
    monkeypatch.delitem(sys.modules, "starts_once", raising=False)
    (tmp_path / "starts_once.py").write_text(STARTS_ONCE.format(log=str(tmp_path / "count"), fails=fails))
    monkeypatch.syspath_prepend(str(tmp_path))
    samples = make_samples("a", "crash", "b")
    with RewardRunner(Reward(functions=["starts_once:score"], workers=1), folder=str(tmp_path)) as runner:
        runner.check([samples[0].prompt])
        runner.score(samples)
    assert [sample.reward for sample in samples] == rewards
    if rewards[2] is None:
        why = samples[2].reward_failures["starts_once:score"]
        assert why.startswith("could not be called: Exit code 3 of the reward worker") and "out of luck" in why


def test_a_worker_that_scores_ends_with_a_trainer_that_is_killed(functions, tmp_path):
    log = tmp_path / "log"
    program = f"""if True:
        from torchtitan.grpo.config.job_config import Reward
        from torchtitan.grpo.data.samples import Prompt, Sample
        from torchtitan.grpo.rewards.runner import RewardRunner
        runner = RewardRunner(Reward(functions=["{functions}:runs_program"], workers=1, timeout_seconds=600.0))
        print(runner._workers[0]._process.pid, flush=True)
        runner.score([Sample(Prompt(0, [1], "?", "", {{"log": {str(log)!r}}}), [1], [0.0], [0], "stop")])
    """
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, env=environment) as trainer:
        worker = int(trainer.stdout.readline())
        deadline = time.monotonic() + 60
        while not (log.exists() and log.read_text().endswith(" ")):
            assert trainer.poll() is None and time.monotonic() < deadline
            time.sleep(0.02)
        trainer.kill()
    wait_until_gone(worker)
    wait_until_gone(int(log.read_text()))


def test_nothing_is_scored_twice_after_a_crash(functions, tmp_path):
    log = tmp_path / "log"
    samples = make_samples("a", "b", "crash", "c", columns={"log": str(log)})
    with RewardRunner(Reward(functions=[f"{functions}:counted"], workers=1)) as runner:
        runner.score(samples)
    assert log.read_text().split() == ["a", "b", "crash", "c"]


def test_worker_killed_while_idle_is_replaced_without_a_failure(functions):
    with RewardRunner(Reward(functions=["numeric_match"], workers=1)) as runner:
        runner.score(make_samples("42"))
        assert len(runner._workers) == 1
        for worker in runner._workers:
            os.kill(worker._process.pid, 9)
            worker._process.wait(5)
        samples = make_samples(*["42", "1"] * 4)
        runner.score(samples)
        assert not runner.failures
    assert [sample.reward for sample in samples] == [1.0, 0.0] * 4


def test_workers_do_not_import_the_main_script_or_touch_cuda(functions):
    samples = make_samples("x")
    with RewardRunner(Reward(functions=[f"{functions}:modules", f"{functions}:processes_cuda"], workers=1)) as runner:
        runner.score(samples)
    assert samples[0].reward == 0.0 and not samples[0].reward_failures


def test_workers_get_no_secrets_but_those_named(functions, monkeypatch):
    hidden = ["HF_TOKEN", "AWS_ACCESS_KEY_ID", "PGPASSWORD", "my_secret", "GOOGLE_APPLICATION_CREDENTIALS", "ROLLOUTS"]
    hidden += ["ENDPOINTS", "TEACHERS"]
    seen = ["TOKENIZERS_PARALLELISM", "KEYBOARD", "JUDGE_API_KEY"]
    for name in [*hidden, *seen]:
        monkeypatch.setenv(name, "false")
    samples = make_samples(*hidden, *seen)
    reward = Reward(functions=[f"{functions}:sees"], workers=1, secrets=["JUDGE_API_KEY"])
    rollout = Rollout(api_key_env="ROLLOUTS", serve_key_env="ENDPOINTS")
    with RewardRunner(reward, rollout, Distill(api_key_env="TEACHERS")) as runner:
        runner.score(samples)
    assert {sample.text: sample.reward for sample in samples} == dict.fromkeys(hidden, 0.0) | dict.fromkeys(seen, 4.0)


def test_threads_may_score_at_once():
    groups = [make_samples(str(i), "x", answer=str(i)) for i in range(24)]
    with RewardRunner(Reward()) as runner:
        threads = [Thread(target=runner.score, args=(group,)) for group in groups]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert all([sample.reward for sample in group] == [1.0, 0.0] for group in groups)


def test_no_samples_and_close_while_scoring(functions):
    runner = RewardRunner(Reward(functions=[f"{functions}:hang"], workers=1, timeout_seconds=500.0))
    runner.score([])
    runner.score(make_samples("x"))  # the process has started
    errors = []

    def score():
        with pytest.raises(RuntimeError, match="closed") as caught:
            runner.score(make_samples("hang"))
        errors.append(caught.value)

    thread = Thread(target=score)
    thread.start()
    time.sleep(0.5)
    start = time.monotonic()
    runner.close()
    thread.join(10)
    assert errors and time.monotonic() - start < 10


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"functions": ["no_such_module:f"]}, ["no_such_module", "[reward] functions"]),
        ({"functions": ["my_rewards:lenght"]}, ['"length"', "my_rewards.py"]),
        ({"functions": ["my_rewards:one_argument"]}, ["2 arguments"]),
        ({"functions": ["__main__:f"]}, ["module"]),
    ],
)
def test_bad_settings_say_what_to_change(functions, settings, words):
    with pytest.raises(UserError) as caught:
        RewardRunner(Reward(**settings))
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(("name", "workers"), [("exact_match", 0), ("numeric_match", 2)])
def test_512_matches_are_fast(name, workers):
    """Aim: under 50 ms on an idle machine; the bound leaves room for a busy one. `exact_match` needs no process."""
    samples = make_samples(*["42", "x"] * 256)
    with RewardRunner(Reward(functions=[name])) as runner:
        assert len(runner._workers) == workers
        runner.score(samples)  # the processes have started
        times = []
        for _ in range(5):
            start = time.monotonic()
            runner.score(samples)
            times.append(time.monotonic() - start)
    assert sum(sample.reward for sample in samples) == 256
    assert min(times) < 0.5, times


def test_without_functions_an_answer_has_no_reward_and_no_process_starts():
    with RewardRunner(Reward(functions=[])) as runner:
        runner.check([Prompt(0, [1], "?")])
        runner.score(samples := make_samples("a"))
        assert runner._workers == []
    assert samples[0].reward is None
    assert "gave no reward" in samples[0].reward_failures["environment"]
