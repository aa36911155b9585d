"""What the evaluations kept, as HTML: the same prompts at every evaluation. A table of pictures of
a model that draws; of a model that writes a card for each prompt, with its pictures, the question,
the wanted answer and the replies over training.

Rows of folders that older versions wrote lack some keys. Every text from outside goes through
`esc`, and pictures are decoded and encoded anew.
"""

from __future__ import annotations

import base64
import io
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from functools import cached_property
from html import escape as esc
from itertools import groupby
from pathlib import Path
from typing import Any

CELL = 240  # px: small pictures are magnified by a whole factor (at most 3) to fit
LARGEST = 320  # px: larger pictures are embedded at this size, as JPEG
SEEN = 512  # px: the same for what a model is shown; there is one of it, not one an evaluation
FOLD = 320  # characters: longer texts are folded,
HEAD, TAIL = 150, 110  # with so many of their beginning and end to be seen
LINES = 8  # lines that are not folded
WORDS = 120  # words and signs of a reply; of longer ones the new are not marked: it takes too long
ALIKE = 0.5  # of two replies; beneath it they are different, and marks would cover everything
KEYS = {"index": int, "prompt": str, "seed": int, "image": str, "parts": dict, "text": str}
ABSENT: dict[str, Any] = {"shown": [], "reply": None, "answer": None, "reward": None, "error": None}


@dataclass(frozen=True)
class Shown:
    """A row of samples/000010.jsonl."""

    index: int
    prompt: str
    seed: int
    image: str  # "" of a model that writes
    shown: tuple[str, ...]  # files of the prompt's own pictures
    reply: str
    answer: str  # "" without one
    reward: float | None
    parts: Mapping[str, float]
    text: str  # what a reward read or said
    error: str

    @staticmethod
    def of(row: Mapping[str, Any]) -> Shown | None:
        """None: the row is damaged."""
        row = {**ABSENT, **row}
        names, parts, reward, answer = row["shown"], row.get("parts"), row["reward"], row["answer"]
        whole = all(isinstance(row.get(key), kind) for key, kind in KEYS.items())
        whole = whole and isinstance(names, list) and all(isinstance(n, str) for n in names)
        whole = whole and all(isinstance(v, (int, float)) for v in (parts or {}).values())
        whole = whole and (row["reply"] is None or isinstance(row["reply"], str))
        if not whole or (not row["image"] and row["reply"] is None):
            return None
        scored = isinstance(reward, (int, float)) and math.isfinite(reward)
        return Shown(
            row["index"],
            row["prompt"],
            row["seed"],
            row["image"],
            tuple(names),
            row["reply"] or "",
            "" if answer is None else answer if isinstance(answer, str) else json.dumps(answer),
            float(reward) if scored else None,
            row["parts"],
            row["text"],
            "" if row["error"] is None else str(row["error"]),
        )

    @cached_property
    def right(self) -> bool | None:
        """None where no reward tells right from wrong: neither a detail `exact`, nor one of the
        rewards that look for an answer (which have a detail `answered`, and are 1 or less)."""
        told = [value for name, value in self.parts.items() if name.endswith("/exact")]
        asked = [n.removesuffix("/answered") for n in self.parts if n.endswith("/answered")]
        told = told or [self.parts[name] for name in asked if name in self.parts]
        return any(value == 1 for value in told) if told else None


Who = tuple[int, str, int]  # index, prompt and seed: the same at every evaluation


def section(
    folder: Path, evaluations: Mapping[int, Sequence[Shown]], figures: Mapping[int, float]
) -> str:
    """evaluations: step → what was kept. figures: step → the held-out figure of metrics.jsonl."""
    steps = sorted(evaluations)
    found: dict[Who, dict[int, Shown]] = {}
    for step in steps:
        for row in evaluations[step]:
            found.setdefault((row.index, row.prompt, row.seed), {})[step] = row
    if not found:
        return "<h2>Samples</h2><i>No evaluation has saved samples yet.</i>"
    if any(row.image for rows in found.values() for row in rows.values()):
        return table(folder, steps, found, figures)
    return cards(folder, steps, found, figures)


def table(
    folder: Path,
    steps: Sequence[int],
    found: Mapping[Who, Mapping[int, Shown]],
    figures: Mapping[int, float],
) -> str:
    """Pictures: a row per prompt and seed, a column per evaluation."""
    reads = any(row.text for rows in found.values() for row in rows.values())
    kinds = {step: "mid" if step not in (steps[0], steps[-1]) else "" for step in steps}
    head, body = "<th>prompt</th>", ""
    for step in steps:
        # Of a run that was killed and resumed, pictures may lie beyond the rows that count.
        figure = f"{figures[step]:.3f}" if step in figures else "not in metrics.jsonl"
        head += f'<th class="{kinds[step]}">step {step} <small>{figure}</small></th>'
    for who, rows in sorted(found.items()):
        given = shown(folder, next(iter(rows.values())))
        body += f"\n<tr><th>{given}{esc(who[1])}<br><small>seed {who[2]}</small></th>"
        for step in steps:
            row = rows.get(step)
            inside = cell(folder, step, row, reads) if row else "<i>not drawn</i>"
            exact = " ok" if row and row.right else ""
            body += f'<td class="{kinds[step]}{exact}">{inside}</td>'
    return (
        f"<h2>The same prompts and seeds at every evaluation</h2>{_ends(steps)}"
        "<div class='scroll' tabindex='0'>"
        f"<table><thead><tr>{head}</thead><tbody>{body}</tbody></table></div>"
    )


def cell(folder: Path, step: int, row: Shown, reads: bool) -> str:
    says = _score(row)
    if reads and not row.error:
        says += f" <code>{esc(row.text)}</code>" if row.text else " <small>no text</small>"
    alt = f"step {step}: {row.prompt}" + (f" (read: {row.text})" if row.text else "")
    return f"{picture(folder / f'{step:06d}', row.image, alt)}<p>{says}</p>"


def cards(
    folder: Path,
    steps: Sequence[int],
    found: Mapping[Who, Mapping[int, Shown]],
    figures: Mapping[int, float],
) -> str:
    """Replies: a card per prompt. What was lost comes first, then what was learnt, then the rest;
    within each those that changed most."""
    kept = [found[who] for who in sorted(found, key=lambda who: (_course(found[who]), who))]
    body = ""
    for _, group in groupby(kept, key=lambda rows: _course(rows)[0]):
        members = list(group)
        title, settled = _title(members[0], steps)
        inside = "\n".join(card(folder, steps, rows) for rows in members)
        body += (
            f"<details {'' if settled else 'open'} class='group'><summary>{title} "
            f"<small>{len(members)}</small></summary>{inside}</details>\n"
        )
    beyond = [str(step) for step in steps if step not in figures]
    note = f"<p><small>not in metrics.jsonl: step {', '.join(beyond)}</small></p>" if beyond else ""
    heading = "The same prompts at every evaluation"
    return f"<h2>{heading}</h2>{_ends(steps)}{note}{body}"


def _course(rows: Mapping[int, Shown]) -> tuple[int, float, int]:
    """What a card is sorted by: its group, and how much it changed."""
    first, last = rows[min(rows)], rows[max(rows)]
    replies = len(list(_runs(sorted(rows), rows)))
    if first.reward is None or last.reward is None:
        return 6, 0.0, -replies
    change = last.reward - first.reward
    if first.right is not None and last.right is not None:
        place = {(True, False): 0, (False, True): 1, (False, False): 2, (True, True): 7}
        return place[first.right, last.right], -abs(change), -replies
    return 3 if change < 0 else 4 if change > 0 else 5, -abs(change), -replies


def _title(rows: Mapping[int, Shown], steps: Sequence[int]) -> tuple[str, bool]:
    """Of a group of cards; and whether there is little to see in it."""
    a, b = steps[0], steps[-1]
    if a == b:
        said = {0: "", 1: "", 2: "wrong", 3: "", 4: "", 5: "replies", 6: "no score", 7: "right"}
        return said[_course(rows)[0]], False
    said = {
        0: f"lost: right at step {a}, wrong at step {b}",
        1: f"learnt: wrong at step {a}, right at step {b}",
        2: f"wrong at step {a} and at step {b}",
        3: f"lower reward at step {b} than at step {a}",
        4: f"higher reward at step {b} than at step {a}",
        5: f"the same reward at step {a} and step {b}",
        6: "without a score at the beginning or the end",
        7: f"right at step {a} and at step {b}",
    }
    place = _course(rows)[0]
    return said[place], place == 7


def card(folder: Path, steps: Sequence[int], rows: Mapping[int, Shown]) -> str:
    one = rows[min(rows)]
    lines, before = "", None
    runs = list(_runs(steps, rows))
    for run in runs:
        row = rows.get(run[0])
        ends = " mid" if run not in (runs[0], runs[-1]) else ""
        when = f"step {run[0]}" + (f" – {run[-1]}" if len(run) > 1 else "")
        if row is None:
            lines += f'<li class="{ends}"><b>{when}</b><i>no reply kept</i></li>'
            continue
        same = f"<small>the same {len(run)} times</small>" if len(run) > 1 else ""
        ok = "" if row.right is None else " ok" if row.right else " no"
        lines += (
            f'<li class="{ok}{ends}"><b>{when}{same}</b><div class="mark">{_score(row)}'
            f"{_news(before, row)}{_parts(row)}</div>"
            f"{_said(before, row)}</li>"
        )
        before = row
    wanted = f'<div class="want">wanted {folded(one.answer)}</div>' if one.answer else ""
    return (
        f'<article>{shown(folder, one)}<div class="talk"><div class="ask">{folded(one.prompt)}'
        f"{wanted}<small>prompt {one.index + 1}</small></div><ol>{lines}</ol></div></article>"
    )


def _said(before: Shown | None, row: Shown) -> str:
    """The reply; dim where it is the one before, with another score."""
    if before is None:
        return folded(row.reply)
    inside = folded(row.reply, marked(before.reply, row.reply))
    return f'<div class="same">{inside}</div>' if before.reply == row.reply else inside


def _runs(steps: Sequence[int], rows: Mapping[int, Shown]) -> Iterator[list[int]]:
    """Evaluations one after another that have the same reply and score."""

    def what(step: int) -> object:
        row = rows.get(step)
        return row and (row.reply, row.reward, row.right, row.error)

    for _, run in groupby(steps, key=what):
        yield list(run)


def _news(before: Shown | None, row: Shown) -> str:
    """What has changed since the evaluation before."""
    if before is None:
        return ""
    if row.right is not None and before.right is not None and row.right != before.right:
        return f"<em>{'newly right' if row.right else 'newly wrong'}</em>"
    if row.reward is None or before.reward is None or row.reward == before.reward:
        return ""
    change = row.reward - before.reward
    return f"<em>{'▲' if change > 0 else '▼'} {abs(change):.3f}</em>"


def _parts(row: Shown) -> str:
    """Of several rewards each by itself; and what one of them read."""
    each = {name: value for name, value in row.parts.items() if "/" not in name}
    said = [f"{esc(name)} {value:.3g}" for name, value in each.items()] if len(each) > 1 else []
    said += [f"read <code>{esc(row.text[:60])}</code>"] if row.text else []
    return f"<small>{', '.join(said)}</small>" if said else ""


def _score(row: Shown) -> str:
    if row.error:
        return f'<span class="err">no score: {esc(row.error)}</span>'
    return f"{row.reward:.3f}" if row.reward is not None else '<span class="err">no score</span>'


def _ends(steps: Sequence[int]) -> str:
    box = '<p><label><input type="checkbox" id="ends"> first and last only</label></p>'
    return box if len(steps) > 2 else ""


def folded(text: str, inside: str | None = None) -> str:
    """`inside` is the text as HTML, where it is more than escaped."""
    inside = esc(text) if inside is None else inside
    if not text.strip():
        return '<div class="says"><i>empty</i></div>'
    if len(text) <= FOLD and text.count("\n") < LINES:
        return f'<div class="says">{inside}</div>'
    head, tail = text[:HEAD].rpartition(" ")[0], text[-TAIL:].partition(" ")[2]  # whole words
    peek = " ".join(f"{head or text[:HEAD]} … {tail or text[-TAIL:]}".split())
    return (
        f'<details class="says"><summary><span>{esc(peek)}</span> <small>{len(text):,} characters'
        f"</small></summary>{inside}</details>"
    )


def marked(before: str, now: str) -> str:
    """Escaped, the words that the reply before did not have marked; nothing is marked where the
    two have little in common."""
    a, b = _words(before), _words(now)
    if max(len(a), len(b)) > WORDS:
        return esc(now)
    match = SequenceMatcher(None, a, b, autojunk=False)
    if match.quick_ratio() < ALIKE or match.ratio() < ALIKE:
        return esc(now)
    pieces = []
    for kind, _, _, low, high in match.get_opcodes():
        piece = esc("".join(b[low:high]))
        pieces.append(f"<mark>{piece}</mark>" if kind != "equal" and piece.strip() else piece)
    return "".join(pieces)


def _words(text: str) -> list[str]:
    return re.findall(r"\w+|\s+|[^\w\s]", text)


def shown(folder: Path, row: Shown) -> str:
    """The pictures that the model was given with the prompt."""
    found = ""
    for i, name in enumerate(row.shown, 1):
        which = f"picture {i} of {len(row.shown)}" if len(row.shown) > 1 else "picture"
        found += picture(folder / "prompts", name, f"{which} of the prompt: {row.prompt}", SEEN)
    return f'<div class="given">{found}</div>' if found else ""


def picture(folder: Path, name: str, alt: str, largest: int = LARGEST) -> str:
    """The picture as a data URI, decoded and encoded anew so that nothing else can come along."""
    from PIL import Image

    try:
        with Image.open(folder / Path(name).name) as opened:
            image = opened.convert("RGB")
    except FileNotFoundError:
        return f'<div class="gone err">{esc(name)} is missing</div>'
    except Exception:  # Pillow answers a damaged file with a dozen types, SyntaxError among them
        return f'<div class="gone err">{esc(name)} cannot be read</div>'
    kind, data = "jpeg" if max(image.size) > largest else "png", io.BytesIO()
    image.thumbnail((largest, largest))
    image.save(data, kind, quality=88)
    zoom = max(1, min(3, CELL // max(image.size)))
    size = f'width="{image.width * zoom}" height="{image.height * zoom}"'
    uri = f"data:image/{kind};base64,{base64.b64encode(data.getvalue()).decode()}"
    return f'<img class="{"near" if zoom > 1 else ""}" {size} alt="{esc(alt)}" src="{uri}">'
