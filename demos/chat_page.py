"""What the demo's page shows of a conversation, as HTML. Everything that people or models wrote is
escaped, and nothing refers to another place."""

from __future__ import annotations

from html import escape

from chat_backend import WAYS, Answer, Conversation, Turn
from chat_cells import DROPPED, PENDING, RESTORED, SELECTED, STATES, Panel
from chat_media import Medium

MEANING = {
    "full": "every token first",
    "hard": "selected tokens only",
    "raincheck": "selected first, the rest later",
}
_EXPLAINED = {
    "selected": "selected: in the first prefill",
    "restored": "restored since",
    "pending": "pending: not seen yet",
    "dropped": "dropped for good",
}
# Up to so many cells a side frames are bold; above the second number they would cover the picture,
# and a tint marks the cells instead.
_SMALL, _FINE = 10, 32
_MOST_PANELS = 16


def views(conversation: Conversation, ways: tuple[str, ...]) -> str:
    """The newest pictures as each way has seen them, side by side, and a legend."""
    shown = [way for way in WAYS if way in ways]
    lanes = "".join(_view(way, conversation.panels(way)) for way in shown)
    legend = "".join(
        f'<li><span class="rc-key {state}"></span>{_EXPLAINED[state]}</li>' for state in STATES
    )
    return f'<div class="rc-lanes">{lanes}</div><ul class="rc-legend">{legend}</ul>'


def transcript(conversation: Conversation) -> str:
    """All questions, each with its answers side by side."""
    if not conversation.turns:
        hint = "Ask about the picture. The answers will stand here, side by side."
        return f'<div class="rc-log"><p class="rc-hint">{hint}</p></div>'
    turns = "".join(_turn(turn) for turn in conversation.turns)
    label = 'role="log" aria-live="polite" aria-label="Conversation" tabindex="0"'
    return f'<div class="rc-log" {label}><div>{turns}</div></div>'


def attachments(conversation: Conversation) -> str:
    """What goes with the next question."""
    if not conversation.attached:
        return '<div class="rc-attached"><span class="rc-hint">No new picture.</span></div>'
    media = "".join(_thumbnail(medium) for medium in conversation.attached)
    return f'<div class="rc-attached"><span>With the next question:</span>{media}</div>'


def notice(messages: list[str]) -> str:
    """Messages that ask for attention; nothing where there are none."""
    lines = "".join(f"<p>{_text(message)}</p>" for message in messages)
    return f'<div class="rc-notice" role="alert">{lines}</div>' if lines else ""


def _view(way: str, panels: list[Panel]) -> str:
    counts = [sum(panel.count(state) for panel in panels) for state in range(len(STATES))]
    pictures = "".join(_picture(panel) for panel in panels[:_MOST_PANELS])
    few = " rc-many" if len(panels) > 1 else ""
    body = pictures or '<p class="rc-hint">no picture yet</p>'
    data = " ".join(f'data-{state}="{count}"' for state, count in zip(STATES, counts, strict=True))
    return (
        f'<figure class="rc-view" data-way="{way}" {data}>'
        f'<figcaption><strong>{way}</strong> <span class="rc-means">{MEANING[way]}</span>'
        f"</figcaption>"
        f'<div class="rc-pictures{few}">{body}</div>'
        f'<p class="rc-counts">{_counted(counts)}</p></figure>'
    )


def _counted(counts: list[int]) -> str:
    total = sum(counts)
    if not total:
        return "&nbsp;"
    told = [f"{n} {state}" for n, state in zip(counts, STATES, strict=True) if n]
    seen = counts[SELECTED] + counts[RESTORED]
    parts = "".join(
        f'<i class="{STATES[state]}" style="width:{100 * counts[state] / total:.1f}%"></i>'
        for state in (SELECTED, RESTORED, DROPPED)
    )
    bar = f'<span class="rc-bar" aria-hidden="true">{parts}</span>'
    return f"{bar}{seen} of {total} seen: {', '.join(told)}"


def _picture(panel: Panel) -> str:
    """The picture and a path a state: far lighter than an element a cell."""
    rows, columns = panel.states.shape
    name = _text(panel.name)
    if not panel.states.size:
        return f'<img class="rc-unseen" src="{panel.shown}" alt="{name}, not seen yet">'
    fine = " rc-fine" if max(rows, columns) > _FINE else ""
    inset = 0.0 if fine else 0.07
    line = 2.2 if max(rows, columns) <= _SMALL else 1.3
    paths = "".join(
        f'<path class="{STATES[state]}" d="{_cells(panel, state, inset)}"/>'
        for state in (PENDING, DROPPED, RESTORED, SELECTED)
        if panel.count(state)
    )
    told = ", ".join(f"{panel.count(state)} {STATES[state]}" for state in range(len(STATES)))
    return (
        f'<svg class="rc-picture{fine}" style="--line:{line}px" '
        f'viewBox="0 0 {columns} {rows}" role="img" '
        f'aria-label="{name}: {told}">'
        f'<image href="{panel.shown}" width="{columns}" height="{rows}" '
        f'preserveAspectRatio="none"/>{paths}</svg>'
    )


def _cells(panel: Panel, state: int, inset: float) -> str:
    """One square for each cell in a state."""
    side = 1 - 2 * inset
    square = f"h{side:g}v{side:g}h-{side:g}z"
    where = zip(*(panel.states == state).nonzero(), strict=True)
    return "".join(f"M{column + inset:g} {row + inset:g}{square}" for row, column in where)


def _turn(turn: Turn) -> str:
    media = "".join(_thumbnail(medium) for medium in turn.media)
    answers = "".join(_answer(way, answer) for way, answer in turn.answers.items())
    return (
        f'<section class="rc-turn"><h3>{media}{_text(turn.question)}</h3>'
        f'<div class="rc-answers">{answers}</div></section>'
    )


def _answer(way: str, answer: Answer) -> str:
    said = f'<p class="rc-said">{_text(answer.text)}</p>' if answer.text else ""
    if answer.state == "failed":
        said += f'<p class="rc-error" role="alert">{_text(answer.error)}</p>'
    return (
        f'<article class="rc-answer" data-way="{way}" data-state="{answer.state}">'
        f"<h4>{way}</h4>{said}<p class='rc-figures'>{_figures(answer)}</p></article>"
    )


def _figures(answer: Answer) -> str:
    if answer.state in ("waiting", "skipped", "failed"):
        return {"waiting": "waiting", "skipped": "stopped before it began"}.get(answer.state, "")
    if answer.state == "writing":
        return f"{answer.tokens} tokens …" if answer.tokens else "reading …"
    ttft, speed = answer.ttft_ms, answer.tokens_per_second
    told = [f"{answer.tokens} token{'s' * (answer.tokens != 1)}"]
    told += [f"TTFT {ttft:.0f} ms"] * (ttft is not None)
    told += [f"{speed:.0f} tokens/s"] if speed is not None else []
    if answer.report is not None and answer.report.restored_in_answer:
        told.append(f"{answer.report.restored_in_answer} restored")
    stopped = "stopped · " if answer.state == "stopped" else ""
    return stopped + " · ".join(told)


def _thumbnail(medium: Medium) -> str:
    name = _text(medium.name)
    return f'<img class="rc-thumb" src="{medium.shown[0]}" alt="{name}" title="{name}">'


def _text(text: str) -> str:
    """Escaped for the page, and for the template language of the component that shows it."""
    safe = escape(text)
    for sign in "{}$@`\\":
        safe = safe.replace(sign, f"&#{ord(sign)};")
    return safe
