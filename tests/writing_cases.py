"""A tiny model that writes: its prompts, jobs for it, and what Transformers writes to them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from mlx_bucket.constraints import Vocabulary, constraint_vocabulary, json_grammar
from mlx_bucket.device import current_device
from mlx_bucket.mlx_writing import MlxWriter
from mlx_bucket.prompts import Prompt, PromptTemplate, chat_template
from mlx_bucket.reference.loading import load_reference, load_reference_tokenizer
from mlx_bucket.reference.writing import ask_to_write
from mlx_bucket.sources import resolve
from mlx_bucket.weights import LoadedModel
from mlx_bucket.workload import make_tickets
from mlx_bucket.writing import WritingJob, WritingTruth

TEXTS = tuple(t.body for t in make_tickets(80, seed=23) if len(t.body) < 250)[:24]
FREQUENT = frozenset(range(0, 600, 23))  # so many end tokens that rows end at many different steps
TRIAGE = {
    "type": "object",
    "properties": {
        "urgency": {"enum": ["low", "medium", "high"]},
        "order": {"type": "integer", "minimum": 1, "maximum": 9999},
    },
    "required": ["urgency", "order"],
    "additionalProperties": False,
}
TAGS = {
    "type": "object",
    "properties": {
        "refund": {"type": ["boolean", "null"]},
        "tags": {"type": "array", "items": {"enum": ["app", "order", "phone"]}, "maxItems": 3},
        "note": {"type": "string", "maxLength": 8},
    },
    "required": ["refund", "tags"],
    "additionalProperties": False,
}
SCHEMAS = {"triage": TRIAGE, "tags": TAGS}


@dataclass(frozen=True)
class Scene:
    """A model of ours, the same as Transformers loads it, and texts with their prompts."""

    loaded: LoadedModel
    reference: Any
    tokenizer: Any
    template: PromptTemplate
    texts: tuple[str, ...]
    prompts: tuple[Prompt, ...]

    @property
    def writer(self) -> MlxWriter:
        """Ours; rows are refilled as soon as one has ended."""
        recipe = self.loaded.entry.recipe
        return MlxWriter(self.loaded.model, current_device(), recipe.dtype, launch_cost=0)

    @cached_property
    def vocabulary(self) -> Vocabulary:
        return constraint_vocabulary(
            self.loaded.tokenizer, self.reference.config.vocab_size, [self.template.end_id]
        )

    def free(self, max_tokens: int = 12, end_ids: frozenset[int] = FREQUENT) -> WritingJob:
        return WritingJob(tuple(prompt.ids for prompt in self.prompts), end_ids, max_tokens)

    def bound(self, name: str, max_tokens: int = 80) -> WritingJob:
        return self.bound_by(SCHEMAS[name], max_tokens)

    def bound_by(self, schema: Mapping[str, Any], max_tokens: int = 80) -> WritingJob:
        free = self.free(max_tokens, frozenset([self.template.end_id]))
        return replace(free, grammar=json_grammar(self.vocabulary, schema))

    def truth(self, job: WritingJob) -> WritingTruth:
        return ask_to_write(
            self.reference, self.tokenizer, self.template, job, self.texts, self.prompts
        )

    def decode(self, ids: Any) -> str:
        return str(self.tokenizer.decode(ids))


def make_scene(
    loaded: LoadedModel,
    name: Path | str,
    texts: tuple[str, ...] = TEXTS,
    instruction: str = "Answer the text.",
) -> Scene:
    """``name`` is that of the original model, as ``resolve`` takes it."""
    source = resolve(str(name))
    template = chat_template(loaded.tokenizer, instruction)
    prompts = template.prompts(texts, window=loaded.config["max_position_embeddings"])
    return Scene(
        loaded,
        load_reference(source),
        load_reference_tokenizer(source),
        template,
        texts,
        tuple(prompt for prompt in prompts if isinstance(prompt, Prompt)),
    )
