"""Makes support tickets of given lengths, with their gold labels and fields.

The lengths are the article's: quantiles of a clipped lognormal, one a ticket, in random order. Each
ticket says one concern; details, remarks and a short end make it exactly as long as it should be.
The invariant: the same count and seed give the same tickets, everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from random import Random
from statistics import NormalDist
from typing import TypeVar

from mlx_bucket.workload import phrases
from mlx_bucket.workload.fields import Said, filled, first_said
from mlx_bucket.workload.languages import LANGUAGES, Language
from mlx_bucket.workload.tokens import count_tokens

PROMPT_TOKENS = 36  # of the default prompt with the six labels, without a text
SHORTEST, LONGEST = 48, 449  # tokens of a whole prompt
SCALE, SPREAD = 46, 1.05  # of the lognormal tail behind the shortest
FOREIGN_SHARE = 0.11  # tried; long tickets have no fitting phrases, so about 7 % are made
EMOJI_SHARE = 0.1
DETAIL_SHARE = 0.7  # of what is said beside the concern, as long as there are details
SHORTEST_SENTENCE = 6  # tokens of a detail or a remark
ASK_TOKENS = 9  # kept free for what is asked for at the end
TRIES = 40

Item = TypeVar("Item")


@dataclass(frozen=True)
class Ticket:
    """A text, the label that a careful reader would give it, and what they would copy out of it.

    A field is written as it stands in the body, of two the one of the main concern (see
    ``fields``); it is None where the body says none.
    """

    id: str
    body: str
    label: str
    order: str | None
    product: str | None
    date: str | None
    amount: str | None


def make_tickets(count: int, seed: int) -> list[Ticket]:
    """``count`` tickets with balanced labels, and the article's lengths in the default prompt."""
    random = Random(f"mlx-bucket {count} {seed}")  # noqa: S311 - not for secrets
    lengths = _shuffled(random, list(_lengths(random, count)))
    names = tuple(phrases.LABELS)
    labels = _shuffled(random, [names[i % len(names)] for i in range(count)])
    tickets: dict[str, Ticket] = {}
    for number, (label, length) in enumerate(zip(labels, lengths, strict=True), start=1):
        body = _new_body(random, label, length - PROMPT_TOKENS, tickets)
        name, fields = f"T{number:06d}", asdict(body.fields)
        tickets[body.text] = Ticket(name, body.text, label, **fields)
    return list(tickets.values())


def _lengths(random: Random, count: int) -> Iterator[int]:
    """Stratified draws, so that every seed has the same shape."""
    for i in range(count):
        share = min(max((i + random.random()) / count, 1e-9), 1 - 1e-9)
        tail = SCALE * math.exp(SPREAD * NormalDist().inv_cdf(share))
        yield round(min(max(SHORTEST + tail, SHORTEST), LONGEST))


def _new_body(random: Random, label: str, tokens: int, taken: Container[str]) -> Said:
    """A body that no ticket has yet; some sentence always has a number to vary."""
    while (body := _body(random, label, tokens)).text in taken:
        pass
    return body


def _body(random: Random, label: str, tokens: int) -> Said:
    """A body of exactly ``tokens`` tokens, or as near below as was found."""
    foreign = random.random() < FOREIGN_SHARE
    best = Said("")
    for _ in range(TRIES):
        if foreign:
            body = _foreign(random, _pick(random, LANGUAGES), label, tokens)
        else:
            body = _english(random, label, tokens)
        if count_tokens(body.text) == tokens:
            return body
        if count_tokens(best.text) < count_tokens(body.text) < tokens:
            best = body
        foreign = foreign and random.random() < 0.8  # a language may have no phrase that fits
    return best if best.text else _english(random, label, tokens)


def _english(random: Random, label: str, tokens: int) -> Said:
    """A greeting, the concern with details and remarks about it, and a signature, as they fit."""
    head = f"{_pick(random, phrases.GREETINGS)}\n" if tokens > 30 and random.random() < 0.6 else ""
    tail = _said(random, _pick(random, phrases.SIGNATURES)).text if random.random() < 0.4 else ""
    tail = f"\n\n{tail}" if tail and tokens > 40 else ""
    concern = _said(random, _pick(random, phrases.CONCERNS[label]))
    happy = label == "opinion"
    if random.random() < EMOJI_SHARE:
        emoji = _pick(random, phrases.HAPPY_EMOJI if happy else phrases.EMOJI)
        concern = replace(concern, text=concern.text + emoji)
    sentences = [concern]
    before = _below(random, 3) if tokens > 60 else 0
    room = tokens - count_tokens(head + concern.text + tail) - ASK_TOKENS
    remarks = phrases.REMARKS if happy else phrases.REMARKS + phrases.COMPLAINTS
    for template in _mixed(random, phrases.DETAILS[label], remarks):
        if room < SHORTEST_SENTENCE:
            break
        sentence = _misspelt(random, _said(random, template))
        cost = count_tokens(f" {sentence.text}")
        if cost > room:
            continue
        room -= cost
        sentences.insert(0 if len(sentences) <= before else len(sentences), sentence)
    ends = [*phrases.ASKS[label], *(_said(random, thanks).text for thanks in phrases.THANKS)]
    body = head + _joined([sentence.text for sentence in sentences])
    text = _completed(random, body, tail, tokens, ends, " ")
    return Said(text, first_said(concern, *sentences))


def _foreign(random: Random, language: Language, label: str, tokens: int) -> Said:
    concern = _said(random, _pick(random, language.concerns[label]))
    body, said = language.greeting + language.between + concern.text, [concern]
    for template in _shuffled(random, language.remarks):
        remark = _said(random, template)
        longer = body + language.between + remark.text
        if count_tokens(longer) <= tokens:
            body = longer
            said.append(remark)
    text = _completed(random, body, "", tokens, language.fillers, language.between)
    return Said(text, first_said(*said))


def _completed(
    random: Random, body: str, tail: str, tokens: int, fillers: Sequence[str], between: str
) -> str:
    """The body with short ends behind it until it has all its tokens, or none fits any more."""
    left = _shuffled(random, fillers)
    missing = tokens - count_tokens(body + tail)
    while missing > 0 and left:
        costs = [count_tokens(between + filler) for filler in left]
        # One that fills the gap, else one that leaves room for another.
        fits = [i for i, cost in enumerate(costs) if cost == missing]
        fits = fits or [i for i, cost in enumerate(costs) if cost < missing - 2]
        if not fits:
            break
        missing -= costs[fits[0]]
        body += between + left.pop(fits[0])
    return body + tail


def _mixed(random: Random, details: Sequence[str], remarks: Sequence[str]) -> Iterator[str]:
    """All of both in random order, with more details than remarks in front."""
    queues = [_shuffled(random, details), _shuffled(random, remarks)]
    while any(queues):
        queue = queues[0] if random.random() < DETAIL_SHARE else queues[1]
        yield (queue or queues[0] or queues[1]).pop()


def _joined(sentences: Sequence[str]) -> str:
    """Sentences as paragraphs of four."""
    paragraphs = [sentences[start : start + 4] for start in range(0, len(sentences), 4)]
    return "\n\n".join(" ".join(paragraph) for paragraph in paragraphs)


def _said(random: Random, template: str) -> Said:
    """The phrase with its slots filled; one without slots draws nothing."""
    return filled(template, _slots(random)) if "{" in template else Said(template)


def _slots(random: Random) -> dict[str, str]:
    """Something for every slot, drawn in this order, on which every later draw depends."""
    first, last = _pick(random, phrases.FIRST_NAMES), _pick(random, phrases.LAST_NAMES)
    day, month = 1 + _below(random, 28), _pick(random, phrases.MONTHS)
    price = 20 + _below(random, 280)
    return {
        "first": first,
        "last": last,
        "mail": f"{first.lower()}@example.com",
        "order": str(10_000 + _below(random, 90_000)),
        "amount": f"${price}.{_below(random, 100):02d}",
        "amount2": f"${price - 1 - _below(random, 15)}.00",
        "count": str(10 + _below(random, 40)),
        "count2": str(2 + _below(random, 8)),
        "code": str(400 + _below(random, 160)),
        "version": f"{1 + _below(random, 9)}.{_below(random, 20)}",
        "year": str(2008 + _below(random, 17)),
        "date": f"{month} {day}",
        "month": month,
        "city": _pick(random, phrases.CITIES),
        "product": _pick(random, phrases.PRODUCTS),
        "weekday": _pick(random, phrases.WEEKDAYS),
    }


def _misspelt(random: Random, sentence: Said) -> Said:
    """Now and then a word as people mistype it; no typo is one of a field."""
    if random.random() > 0.08:
        return sentence
    words = sentence.text.split(" ")
    return replace(sentence, text=" ".join(phrases.TYPOS.get(word, word) for word in words))


def _pick(random: Random, items: Sequence[Item]) -> Item:
    return items[_below(random, len(items))]


def _below(random: Random, limit: int) -> int:
    return int(random.random() * limit)


def _shuffled(random: Random, items: Sequence[Item]) -> list[Item]:
    """A new order; ``random.random`` alone gives the same one on every Python version."""
    return [
        item for _, _, item in sorted((random.random(), i, item) for i, item in enumerate(items))
    ]
