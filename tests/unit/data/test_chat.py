"""Which tokens of a conversation are the assistant's: against transformers' own masks, and read as text."""

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from torchtitan.grpo.config.job_config import Data
from torchtitan.grpo.data.chat import ChatRenderer, conversation, rendered, tools_of
from torchtitan.grpo.data.prompts import PromptSource
from torchtitan.grpo.data.tokenizer import end_token_ids
from torchtitan.grpo.errors import UserError

CHATML = (
    "{% if tools %}<|im_start|>tools\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for call in m.tool_calls or [] %}<call>{{ call.function | tojson }}</call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MARKED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
    "<|im_end|>{% endgeneration %}{% else %}{{ m.content }}<|im_end|>{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MARKED_WITHOUT_END = MARKED.replace("<|im_end|>{% endgeneration %}", "{% endgeneration %}<|im_end|>")
INST = (
    "{% for m in messages %}{{ '[INST] ' + m.content + ' [/INST]' if m.role == 'user' else m.content + '<|im_end|>' }}"
    "{% endfor %}"
)
ENDS_WITH_THE_NEXT = CHATML.replace(
    "<|im_end|>\n{% endfor %}", "{% if add_generation_prompt or not loop.last %}<|im_end|>\n{% endif %}{% endfor %}"
)
THINKING = (  # as Qwen3's: thinking is removed from turns that a user has answered
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and not loop.last %}{{ m.content.split('</think>')[-1].lstrip() }}"
    "{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SWITCHED = CHATML.replace(  # as Qwen3's: off only if it is told so
    "assistant\n{% endif %}",
    "assistant\n{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}"
    "{% endif %}",
)
OPENS_THINKING = CHATML.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")
TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is 1+1?"},
    {"role": "assistant", "content": "  It is 2, natürlich 🙂. "},
    {"role": "user", "content": "And 2+2?"},
    {"role": "assistant", "content": "4"},
]
END = 1


@pytest.fixture(scope="module")
def base():
    words = Tokenizer(models.BPE())
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    words.decoder = decoders.ByteLevel()
    special = ["<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    words.train_from_iterator(["What is the answer? It is what it is.\n\n\nuser\nassistant\nsystem\n"] * 20, trainer)
    return words


@pytest.fixture
def tokenizer(base):
    return PreTrainedTokenizerFast(tokenizer_object=base, eos_token="<|im_end|>", clean_up_tokenization_spaces=False)


def documents(tokenizer, template, messages, last_only=False, tools=None):
    tokenizer.chat_template = template
    return ChatRenderer(tokenizer, [END], last_only).documents(messages, tools, "row 0")[0]


def learned(tokenizer, document):
    return tokenizer.decode(document.token_ids[document.trained].tolist())


@pytest.mark.parametrize(
    "template, said",
    [
        (CHATML, "  It is 2, natürlich 🙂. <|im_end|>4<|im_end|>"),
        (MARKED, "  It is 2, natürlich 🙂. <|im_end|>4<|im_end|>"),
        (MARKED_WITHOUT_END, "  It is 2, natürlich 🙂. <|im_end|>4<|im_end|>"),
        (INST, "  It is 2, natürlich 🙂. <|im_end|>4<|im_end|>"),
    ],
)
def test_every_turn_is_learned_with_its_end_token_and_nothing_else(tokenizer, template, said):
    talk = TALK if template != INST else TALK[1:]
    (document,) = documents(tokenizer, template, talk)
    whole = tokenizer.apply_chat_template(talk, tokenize=True, return_dict=True)["input_ids"]
    assert document.token_ids.tolist() == whole
    assert learned(tokenizer, document) == said
    (last,) = documents(tokenizer, template, talk, last_only=True)
    assert learned(tokenizer, last) == "4<|im_end|>" and last.token_ids.tolist() == whole


def test_prefixes_find_what_transformers_finds_by_marks(tokenizer):
    rng = np.random.default_rng(0)
    pieces = ["hello", " ", "\n", "1+1", "What is", "é", "🙂", "user", "<call>", "  "]
    for _ in range(50):
        turns = 2 * int(rng.integers(1, 5))
        talk = [
            {"role": ("user", "assistant")[i % 2], "content": "x" + "".join(rng.choice(pieces, rng.integers(0, 9)))}
            for i in range(turns)
        ]
        (document,) = documents(tokenizer, CHATML, talk)
        tokenizer.chat_template = MARKED
        own = tokenizer.apply_chat_template(talk, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
        assert document.token_ids.tolist() == own["input_ids"]
        assert document.trained.tolist() == [bool(mark) for mark in own["assistant_masks"]]


def test_a_template_that_changes_earlier_turns_gives_a_document_for_each(tokenizer):
    talk = [
        {"role": role, "content": content}
        for role, content in (
            ("user", "1+1?"),
            ("assistant", "<think>one</think>2"),
            ("user", "2+2?"),
            ("assistant", "<think>two</think>4"),
        )
    ]
    first, second = documents(tokenizer, THINKING, talk)
    assert learned(tokenizer, first) == "<think>one</think>2<|im_end|>"
    assert learned(tokenizer, second) == "<think>two</think>4<|im_end|>"
    context = tokenizer.decode(second.token_ids[~second.trained].tolist())
    assert "<|im_start|>assistant\n2<|im_end|>" in context and "one" not in context
    for end, document in ((2, first), (4, second)):  # each as a server would be asked at that turn
        prompt = tokenizer.apply_chat_template(talk[: end - 1], add_generation_prompt=True, return_dict=True)[
            "input_ids"
        ]
        assert document.token_ids[: len(prompt)].tolist() == prompt and not document.trained[: len(prompt)].any()
    (last,) = documents(tokenizer, THINKING, talk, last_only=True)
    assert last.token_ids.tolist() == second.token_ids.tolist()


def test_tools_and_tool_calls_reach_the_template(tokenizer):
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    rows = [
        {"role": "user", "content": "1+1?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "2"},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "thanks"},
    ]
    messages = conversation(rows, "", True, "row 0")
    (document,) = documents(tokenizer, CHATML, messages, tools=tools_of('[{"name": "add"}]', "row 0"))
    assert learned(tokenizer, document) == '<call>{"name": "add", "arguments": {"a": 1}}</call><|im_end|>2<|im_end|>'
    text = tokenizer.decode(document.token_ids.tolist())
    assert text.startswith('<|im_start|>tools\n[{"name": "add"}]') and "thanks" not in text


def test_an_end_token_that_comes_with_the_next_message_is_learned(tokenizer):
    (document,) = documents(tokenizer, ENDS_WITH_THE_NEXT, TALK)
    assert learned(tokenizer, document) == "  It is 2, natürlich 🙂. <|im_end|>4"


def test_a_token_that_begins_before_the_turn_is_not_learned(tokenizer):
    (document,) = documents(tokenizer, CHATML, [TALK[1], {"role": "assistant", "content": "\n\nIt"}])
    assert "\n\n" in [tokenizer.decode([token]) for token in document.token_ids.tolist()], "the case of this test"
    assert learned(tokenizer, document) == "\nIt<|im_end|>"


def test_what_cannot_be_told_apart_is_refused(tokenizer):
    with pytest.raises(UserError, match=r"row 0: .*message 2 otherwise .*\{% generation %\} .*chat_template_file"):
        documents(tokenizer, OPENS_THINKING, TALK)
    with pytest.raises(UserError, match="row 0: the chat template refuses these messages: roles"):
        documents(tokenizer, "{{ raise_exception('roles') }}", TALK)
    with pytest.raises(UserError, match="shows nothing of what the assistant says"):
        documents(
            tokenizer, "{% for m in messages %}{{ m.content }}{% generation %}{% endgeneration %}{% endfor %}", TALK
        )


@pytest.mark.parametrize(
    "value, said",
    [
        ("hello" * 10**5, r"must hold a list of chat messages, not .{200}\W+500,002 characters.$"),
        ([], "must hold a list of chat messages"),
        ([{"content": "x"}], 'must hold {"role": text'),
        ([{"role": "user", "content": [{"type": "image"}]}], "content of a message must be text"),
        (TALK[:2], "no message of the assistant"),
        (TALK[2:], "begins with the assistant"),
        ([*TALK[:2], {"role": "assistant", "content": None, "tool_calls": None}], "neither content nor tool_calls"),
        ([*TALK[:2], {"role": "assistant"}], "neither content nor tool_calls"),
    ],
)
def test_rows_that_are_no_conversation_are_refused(value, said):
    with pytest.raises(UserError, match=said):
        conversation(value, "", False, "data.jsonl:3")


def test_text_parts_are_joined_and_a_call_needs_no_text():
    parts = [{"type": "text", "text": "1+"}, {"type": "text", "text": "1"}]
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "add", "arguments": {}}}]}
    asked, called = conversation([{"role": "user", "content": parts}, call], "", False, "row 0")
    assert asked["content"] == "1+1" and called == call | {"content": ""}


def test_a_system_prompt_is_put_first_and_never_twice():
    assert conversation(TALK[1:3], "Be kind.", False, "row 0")[0] == {"role": "system", "content": "Be kind."}
    with pytest.raises(UserError, match=r"a system message of its own: empty \[data\] system_prompt"):
        conversation(TALK, "Be kind.", False, "row 0")


@pytest.mark.parametrize(
    "value, said",
    [("{", "is not JSON"), ("[" * 10**5, "is not JSON"), ('{"a": 1}', "must be a list"), (3, "must be a list")],
)
def test_tools_that_are_no_list_are_refused(value, said):
    with pytest.raises(UserError, match=said):
        tools_of(value, "row 0")
    assert tools_of("", "row 0") is None and tools_of(None, "row 0") is None


def test_prompts_end_in_an_empty_thought_where_thinking_is_switched_off(tokenizer):
    tokenizer.chat_template = SWITCHED
    ends = []
    for own in ({}, {"enable_thinking": True}, {"enable_thinking": False}):
        data = Data(source_args={"max": 1}, chat_template_kwargs=own)
        ends.append(PromptSource(data, tokenizer, 0).next(1)[0].text.rpartition("assistant\n")[2])
    assert ends == ["", "", "<think>\n\n</think>\n\n"]
    with pytest.raises(UserError, match=r"\[data\] chat_template_kwargs names 'enable_thinkin'"):
        PromptSource(Data(chat_template_kwargs={"enable_thinkin": False}), tokenizer, 0)


def test_a_template_whose_turns_end_in_no_end_token_is_warned_about(tokenizer, tmp_path, caplog):
    """As in base models of Qwen3, whose end token is that of a document."""
    tokenizer.add_special_tokens({"extra_special_tokens": ["<|endoftext|>"]})
    tokenizer.chat_template = CHATML
    assert end_token_ids(tokenizer, str(tmp_path)) == [END] and not caplog.records
    tokenizer.eos_token = "<|endoftext|>"
    assert end_token_ids(tokenizer, str(tmp_path)) == [tokenizer.eos_token_id]
    assert "ends a turn with <|im_end|>" in caplog.text and f"stop_token_ids has {END}" in caplog.text
    caplog.clear()
    (tmp_path / "generation_config.json").write_text(f'{{"eos_token_id": [{END}]}}')
    end_token_ids(tokenizer, str(tmp_path))
    tokenizer.chat_template = "{{ raise_exception('tools only') }}"
    end_token_ids(tokenizer, str(tmp_path))
    assert not caplog.records


@pytest.mark.parametrize("call", ["('%d %b %Y')", '("%d %b %Y")', ' ( format = "%d %b %Y" )'])
def test_no_prompt_changes_at_midnight(tokenizer, call):
    day = f"{{{{ strftime_now{call} }}}} {{% if strftime_now is defined %}}of a clock{{% endif %}} "
    tokenizer.chat_template = day + CHATML
    text = rendered(tokenizer, "row 0", TALK[:2], tokenize=False, add_generation_prompt=True)
    assert text.startswith("26 Jul 2024 of a clock <|im_start|>system")
    assert tokenizer.chat_template == day + CHATML, "which is exported"


def test_a_template_that_writes_the_date_in_another_way_is_a_warning(tokenizer, caplog):
    tokenizer.chat_template = "{% set how = '%Y' %}{{ strftime_now(how) }}" + CHATML
    for _ in range(2):
        assert rendered(tokenizer, "row 0", TALK[:2], tokenize=False).startswith("20")
    assert caplog.text.count("prompts change at midnight") == 1
