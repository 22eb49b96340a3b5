"""How scripts/check_words.py cuts Markdown into sentences, and what it refuses."""

import sys

import pytest

from tests.helpers import ROOT

sys.path.insert(0, str(ROOT / "scripts"))

from check_words import LONGEST_WORDS, main, measure, report


def texts(markdown: str) -> list[str]:
    return [sentence.text for sentence in measure(markdown)]


def words(markdown: str) -> list[int]:
    return [sentence.words for sentence in measure(markdown)]


@pytest.mark.parametrize(
    "sentence",
    [
        "It takes 0.32 seconds on two cores.",
        "It needs vLLM 0.25.1 to 0.32, and torch 2.11.0+cu130, on Linux.",
        "See docs/async.md and grpo_train.py for the loop.",
        "Use a short name, e.g. the model's, for this.",
        "It holds the newest version (i.e. the last one) for a while.",
        "Dr. GRPO divides by a constant.",
        "The error ends with unhandled ... invalid argument in the log.",
        "The server stops: it drains; then it takes weights.",
    ],
)
def test_one_sentence(sentence):
    assert texts(sentence) == [sentence]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("It takes 0.32 s. It needs 0.25.1. Done!", ["It takes 0.32 s.", "It needs 0.25.1.", "Done!"]),
        ("Run it. vLLM then starts.", ["Run it.", "vLLM then starts."]),
        ("Is it on? `publish` returns.", ["Is it on?", "CODE returns."]),
        ("**The plan is pure.** It holds.", ["**The plan is pure.**", "It holds."]),
        ("It waits (for one.) Then it ends.", ["It waits (for one.)", "Then it ends."]),
        ("It waits ... Then it ends.", ["It waits ...", "Then it ends."]),
    ],
)
def test_several_sentences(text, expected):
    assert texts(text) == expected


def test_a_sentence_goes_on_over_lines_and_knows_where_it_starts():
    found = measure("# Title\n\nOne is\nhere. Two\nis there.\n\nThree.\n")
    assert [(sentence.line, sentence.text) for sentence in found] == [
        (3, "One is here."),
        (4, "Two is there."),
        (7, "Three."),
    ]


def test_lines_are_right_behind_code_and_comments():
    text = "<!-- one\ntwo -->\n```\na. b\n```\n`a\nb` is. Here it is.\n"
    assert [(sentence.line, sentence.text) for sentence in measure(text)] == [(6, "CODE is."), (7, "Here it is.")]


@pytest.mark.parametrize(
    "markdown",
    [
        "# A heading. With two sentences.\n",
        "```bash\npip install this. And that.\n```\n",
        "~~~\na ``` b. c\n~~~\n",
        "````\n```\nstill code. here\n````\n",
        "    indented code. is code\n",
        "<!-- Generated: edit\n\nthat file. -->\n",
        "![A picture. Of two](docs/a.png)\n",
        "| --- | :---: |\n",
        "+- / ->\n",
    ],
)
def test_what_is_no_prose(markdown):
    assert texts(markdown) == []


def test_code_blocks_end_a_paragraph_and_the_text_behind_them_counts():
    assert texts("Run this:\n\n    a b c. d\n\nThen that.\n") == ["Run this:", "Then that."]
    assert texts("Run this:\n```\na b c. d\n```\nThen that.\n") == ["Run this:", "Then that."]


def test_each_list_item_ends_its_sentence():
    found = texts("Two ways:\n- the first\n  goes on\n- the second. It is longer\n1. a third\n\n   with a paragraph\n")
    expected = ["Two ways:", "the first goes on", "the second.", "It is longer", "a third", "with a paragraph"]
    assert found == expected


def test_code_in_a_list_item_needs_the_indent_of_the_item_and_four_more():
    assert texts("- one\n\n      code. here\n\n  two is text\n") == ["one", "two is text"]


def test_each_table_cell_ends_its_sentence_and_labels_do_not_count():
    table = "| key | what |\n| --- | --- |\n| `a` | One sentence of five. Another is here now |\n| `b\\|c` | 0.32 s |\n"
    assert texts(table) == ["One sentence of five.", "Another is here now"]


def test_a_pipe_in_a_cell_does_not_cut_it():
    assert texts("| one \\| two three four five |\n") == ["one \\| two three four five"]


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("Set `[rollout] max_concurrent_requests = 4` first.", 3),
        ("Use ``a `b` c`` here.", 3),
        ("Read [the tuning guide](docs/performance.md) now.", 5),
        ("Read [that][1] now.", 3),
        ("It costs 1.2 ms +- 0.1 ms.", 6),
        ("A first-class, well-known key/value.", 4),
    ],
)
def test_words(text, count):
    assert words(text) == [count]


def sentence_of(count: int) -> str:
    return " ".join(["word"] * count) + "."


def test_a_sentence_of_35_words_is_the_longest():
    short = " ".join([sentence_of(1)] * 3)
    assert report([("a.md", f"{sentence_of(LONGEST_WORDS)} {short}")])[1]
    text, is_good = report([("a.md", f"{short}\n\n{sentence_of(LONGEST_WORDS + 1)}")])
    assert not is_good
    assert "a.md:3: 36 words: word word" in text


def test_the_mean_must_be_under_18():
    assert report([("a.md", f"{sentence_of(18)} {sentence_of(17)}")])[1]
    assert not report([("a.md", f"{sentence_of(18)} {sentence_of(18)}")])[1]


def test_short_table_cells_do_not_hide_long_sentences_in_the_text():
    cells = "\n".join(["| one short cell here |"] * 50)
    assert report([("a.md", f"{cells}\n\n{sentence_of(17)}")])[1]
    assert not report([("a.md", f"{cells}\n\n{sentence_of(18)}")])[1]


def test_tables_have_the_same_bound():
    assert not report([("a.md", f"{sentence_of(4)}\n\n| {sentence_of(18)} |")])[1]


def test_one_bad_file_is_enough():
    assert not report([("a.md", sentence_of(40)), ("b.md", sentence_of(3))])[1]


def test_an_empty_file_is_good():
    assert report([("a.md", "")])[1]


def test_the_command_names_an_unknown_file(capsys):
    with pytest.raises(SystemExit):
        main(["docs/none.md"])
    assert "docs/none.md" in capsys.readouterr().err


def test_the_command_reads_all_documentation(capsys):
    main([])
    names = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert {"README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/async.md", "docs/configuration.md"} <= set(names)
