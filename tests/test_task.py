"""Claims about tasks: labels, instruction and template are judged before any row is."""

from __future__ import annotations

import pytest

from mlx_bucket.errors import UsageError
from mlx_bucket.windows import build_task
from tests.tiny_models import tiny_config
from tests.tiny_tokenizer import make_tokenizer

LABELS = ("billing", "technical")


def task(labels=LABELS, *, context: int = 512, **options):
    config = {**tiny_config("qwen2"), "max_position_embeddings": context}
    return build_task(make_tokenizer(), config, labels, **options)


@pytest.mark.parametrize(
    ("what", "options"),
    [
        ("label", {"labels": ["a", "caf\udce9"]}),
        ("label", {"labels": {"a": "x", "\ud800": "y"}}),
        ("description", {"labels": {"a": "x", "b": "\udfff"}}),
        ("instruction", {"instruction": "Pick \udce9"}),
        ("template", {"template": "{text}\udce9"}),
    ],
)
def test_half_of_a_surrogate_pair_is_refused_by_place(what, options):
    with pytest.raises(UsageError, match=rf"The {what} '.*\\ud.*encoding may not be UTF-8"):
        task(**options)


def test_a_prompt_that_leaves_no_room_for_a_text_is_refused_at_once():
    needed = task().template.fixed_tokens()
    assert task(context=needed + 1).prompting.window == needed + 1
    with pytest.raises(UsageError, match=f"has {needed} tokens before any text.*at most {needed};"):
        task(context=needed)


@pytest.mark.parametrize(
    "labels", [[" billing", "technical\n"], {" billing": "", "technical ": ""}]
)
def test_labels_are_stripped(labels):
    assert task(labels).trie.names == LABELS


def test_labels_that_are_equal_once_stripped_are_refused():
    with pytest.raises(UsageError, match="'billing' has two descriptions"):
        task({"billing": "money", " billing": "more", "technical": ""})
    with pytest.raises(UsageError, match="equal token ids"):
        task(["billing", "billing ", "technical"])


def test_a_description_may_name_the_places_of_a_template():
    labels = {"billing": "says {text} or {labels}", "technical": "says {instruction}"}
    whole = task(labels, template="{labels}\n{text}").template.whole_string("Help!")
    assert "- billing: says {text} or {labels}\n- technical: says {instruction}\nHelp!" in whole
