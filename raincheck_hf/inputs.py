"""What is new in a call: tokens, images and videos against what the conversation already holds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

TEXT, IMAGE, VIDEO = 0, 1, 2
KINDS = {IMAGE: "image", VIDEO: "video"}
PIXEL_KEYS = {"image": "pixel_values", "video": "pixel_values_videos"}
GRID_KEYS = {"image": "image_grid_thw", "video": "video_grid_thw"}
SECONDS_KEY = "second_per_grid_ts"


class TokenIds(Protocol):
    """The special token ids of a model's config."""

    image_token_id: int
    video_token_id: int


@dataclass(frozen=True, eq=False)
class Item:
    """One image or video of a conversation.

    Attributes:
        kind: ``"image"`` or ``"video"``.
        grid: (t, h, w) in patches.
        checksum: int64 scalar over its exact pixel values, on their device: nothing waits for it
            until an old picture is passed again.
        seconds: Between a video's temporal patches, where positions tell time (Qwen2.5-VL).
    """

    kind: str
    grid: tuple[int, int, int]
    checksum: Tensor
    seconds: float = 1.0


@dataclass(frozen=True)
class NewInput:
    """The part of a call's input that the cache does not hold.

    Attributes:
        ids: int64 [L] on the CPU.
        offset: Where ``ids`` starts in ``input_ids`` as passed.
        whole: Whether the whole conversation was passed, not the new tokens alone.
        rollback: Whether the last answer has to be dropped first (rule 14).
        types: int64 [L] on the CPU: 0 text, 1 image, 2 video.
        items: The new images and videos in source order.
        pixels: By kind, pixel values [patches, c] and grid [items, 3] (on the CPU) of new items.
    """

    ids: Tensor
    offset: int
    whole: bool
    rollback: bool
    types: Tensor
    items: tuple[Item, ...]
    pixels: dict[str, tuple[Tensor, Tensor]]

    @property
    def seconds(self) -> list[float]:
        """Seconds between temporal patches of each new video."""
        return [item.seconds for item in self.items if item.kind == "video"]


class History(Protocol):
    """What is known of the conversation so far."""

    @property
    def prompt_ids(self) -> Tensor:
        """int64 [n] on the CPU: everything up to the end of the last turn's input."""

    @property
    def consumed_ids(self) -> Tensor:
        """int64 [n + y] on the CPU: the same and the consumed part of the last answer."""

    @property
    def items(self) -> tuple[Item, ...]:
        """Images and videos, in source order."""


def read_input(
    input_ids: Tensor,
    attention_mask: Tensor | None,
    media: dict[str, Any],
    history: History,
    last_token: int | None,
    tokens: TokenIds,
    merge: int,
    frames_apart: bool = True,
) -> NewInput:
    """Split a call's input into what the cache holds and what is new.

    Args:
        input_ids: int64 [1, L], the whole conversation, or the new tokens alone. New tokens alone
            are recognised by an attention mask longer than they are, or by their first token being
            the last generated one.
        attention_mask: [1, n] without zeros, or None.
        media: ``pixel_values``, ``image_grid_thw``, ``pixel_values_videos``, ``video_grid_thw``,
            each a tensor or absent, and ``second_per_grid_ts``, one number a video; of the whole
            conversation, or of the new items alone.
        history: What the cache holds.
        last_token: The last generated token, not consumed yet, if known.
        tokens: The config's special token ids.
        merge: Patches along a side that the vision tower merges into one token.
        frames_apart: Whether a video is one run of placeholders a frame, not one in all.

    Raises:
        ValueError: The input parts from the conversation before the last answer, holds nothing
            new, names another picture under the same tokens, or media and tokens do not match.
    """
    passed = input_ids[0].cpu()
    offset, whole, rollback = _align(passed, attention_mask, history, last_token)
    ids = passed[offset:]
    types = torch.where(
        ids == tokens.image_token_id, IMAGE, torch.where(ids == tokens.video_token_id, VIDEO, TEXT)
    )
    runs = _runs(types)
    given = {kind: _media_of(kind, media) for kind in KINDS.values()}
    apart = {"image": False, "video": frames_apart}
    wanted = {kind: _items_in(runs, code, given[kind], apart[kind]) for code, kind in KINDS.items()}
    pixels: dict[str, tuple[Tensor, Tensor]] = {}
    items: dict[str, list[Item]] = {}
    for kind, (count, frames) in wanted.items():
        fresh = _new_media(kind, given[kind], count, history)
        if fresh is not None:
            _check_runs(kind, frames, fresh.grid, merge, apart[kind])
            pixels[kind] = (fresh.pixels, fresh.grid)
        items[kind] = _describe(kind, fresh) if fresh is not None else []
    ordered = _source_order(runs, items, frames_apart)
    return NewInput(ids, offset, whole, rollback, types, ordered, pixels)


def _align(
    passed: Tensor, mask: Tensor | None, history: History, last_token: int | None
) -> tuple[int, bool, bool]:
    """Where the new tokens start, whether all were passed, whether the last answer is dropped."""
    consumed = history.consumed_ids
    if len(consumed) == 0:
        if mask is not None and mask.shape[-1] != len(passed):
            raise ValueError(
                f"attention_mask has {mask.shape[-1]} columns for {len(passed)} input_ids and an "
                "empty cache; they must be as many"
            )
        return 0, True, False
    lengths = (len(passed), len(consumed) + len(passed))
    if mask is not None and mask.shape[-1] not in lengths:
        raise ValueError(
            f"attention_mask has {mask.shape[-1]} columns; expected {lengths[0]}, as input_ids, or "
            f"{lengths[1]}, for new tokens behind the {len(consumed)} in the cache "
            "(input_ids[:, cache.get_seq_length():])"
        )
    longer_mask = mask is not None and mask.shape[-1] > len(passed)
    first = int(passed[0])
    if longer_mask or (first == last_token and first != int(consumed[0])):
        if last_token is not None and first != last_token:
            raise ValueError(
                f"new tokens alone must start with the last generated token ({last_token}), which "
                f"is not in the cache yet; got {first}. Pass input_ids from "
                "cache.get_seq_length() on, or the whole conversation"
            )
        return 0, False, False
    common = min(len(passed), len(consumed))
    differs = (passed[:common] != consumed[:common]).nonzero()
    parts_at = int(differs[0]) if len(differs) else common
    turn_end = len(history.prompt_ids)
    if parts_at < turn_end:
        where = "ends" if parts_at == len(passed) else f"has {int(passed[parts_at])}"
        raise ValueError(
            f"input_ids part from the cached conversation at token {parts_at}: the cache holds "
            f"{int(consumed[parts_at])}, the input {where} there, before the last answer (token "
            f"{turn_end}). Chat templates that rewrite earlier turns do this; pass the ids that "
            "were cached (cache.token_ids), the last generated token and the new ones, or start "
            "with a new cache"
        )
    offset = len(consumed) if parts_at == len(consumed) else turn_end
    if offset >= len(passed):
        raise ValueError(
            f"input_ids ({len(passed)} tokens) hold nothing that is not in the cache already "
            f"({len(consumed)} tokens); a next turn needs at least one new token"
        )
    return offset, True, offset < len(consumed)


def _runs(types: Tensor) -> list[tuple[int, int]]:
    """(type, length) of consecutive tokens of one type."""
    values, counts = torch.unique_consecutive(types, return_counts=True)
    return list(zip(values.tolist(), counts.tolist(), strict=True))


class _Media(NamedTuple):
    """Items of one kind: pixels [patches, c], grid [items, 3] on the CPU, seconds of each item."""

    pixels: Tensor
    grid: Tensor
    seconds: list[float]

    def cut(self, at: int) -> tuple[_Media, _Media]:
        """The first ``at`` items, and the others."""
        rows = int(self.grid[:at].prod(-1).sum())
        first = _Media(self.pixels[:rows], self.grid[:at], self.seconds[:at])
        return first, _Media(self.pixels[rows:], self.grid[at:], self.seconds[at:])


def _media_of(kind: str, media: dict[str, Any]) -> _Media | None:
    """What was passed of one kind, checked against each other; None where nothing was."""
    pixel_key, grid_key = PIXEL_KEYS[kind], GRID_KEYS[kind]
    pixels, grid = media.get(pixel_key), media.get(grid_key)
    if pixels is None:
        return None  # a grid alone says nothing: follow-ups may leave out old pixels
    if grid is None:
        raise ValueError(f"{pixel_key} needs {grid_key}; pass what the processor returned")
    if not isinstance(pixels, Tensor) or not pixels.is_floating_point():
        raise TypeError(f"{pixel_key} must be a floating-point tensor; got {_kind_of(pixels)}")
    if not isinstance(grid, Tensor) or grid.is_floating_point():
        raise TypeError(f"{grid_key} must be an integer tensor; got {_kind_of(grid)}")
    if grid.ndim != 2 or grid.shape[1] != 3:
        raise ValueError(f"{grid_key} must be [items, 3], got {list(grid.shape)}")
    grid = grid.cpu()  # its numbers are asked for again and again
    patches = int(grid.prod(-1).sum())
    if pixels.ndim != 2 or len(pixels) != patches:
        raise ValueError(
            f"{grid_key} counts {patches} patches, but {pixel_key} is {list(pixels.shape)}"
        )
    seconds = media.get(SECONDS_KEY) if kind == "video" else None
    return _Media(pixels, grid, _seconds(seconds, len(grid)))


def _seconds(passed: Any, items: int) -> list[float]:
    """One number an item; 1 where the call has none, as in stock."""
    if passed is None:
        return [1.0] * items
    values = passed.tolist() if hasattr(passed, "tolist") else passed
    if not isinstance(values, list | tuple) or not all(isinstance(x, int | float) for x in values):
        raise TypeError(f"{SECONDS_KEY} must be one number a video; got {_kind_of(passed)}")
    if len(values) != items or not all(0 < x < math.inf for x in values):
        raise ValueError(
            f"{SECONDS_KEY} must be one positive number for each of {items} video(s); got {values}"
        )
    return list(values)


def _kind_of(value: Any) -> str:
    return str(value.dtype) if isinstance(value, Tensor) else type(value).__name__


def _items_in(
    runs: Sequence[tuple[int, int]], code: int, given: _Media | None, apart: bool
) -> tuple[int, list[int]]:
    """How many items of a kind the new tokens hold, and the lengths of their runs.

    An image is one run of placeholders. Where a video is one run a frame, counting videos needs
    the grids: those of the new videos are the last ones given.
    """
    frames = [length for kind, length in runs if kind == code]
    if not apart or not frames:
        return len(frames), frames
    if given is None:
        raise ValueError(
            f"input_ids hold placeholders of new videos ({len(frames)} frames), but "
            f"{PIXEL_KEYS['video']} is missing; pass it with {GRID_KEYS['video']}"
        )
    left, count = len(frames), 0
    for t in reversed(given.grid[:, 0].tolist()):
        if left <= 0:
            break
        left -= t
        count += 1
    return count, frames


def _new_media(kind: str, given: _Media | None, count: int, history: History) -> _Media | None:
    """The ``count`` new items; old ones that came along are recognised."""
    known = [item for item in history.items if item.kind == kind]
    if given is None:
        if count:
            raise ValueError(
                f"input_ids hold placeholders of {count} new {kind}(s), but {PIXEL_KEYS[kind]} "
                f"is missing; pass it with {GRID_KEYS[kind]}"
            )
        return None
    passed = len(given.grid)
    if passed not in (count, count + len(known)):
        raise ValueError(
            f"{GRID_KEYS[kind]} describes {passed} {kind}(s), but input_ids hold placeholders "
            f"of {count} new one(s) beside {len(known)} in the cache"
        )
    if passed > count:
        old, given = given.cut(len(known))
        _check_known(kind, known, _describe(kind, old))
    return given if count else None


def _check_known(kind: str, known: Sequence[Item], passed: Sequence[Item]) -> None:
    for index, (old, new) in enumerate(zip(known, passed, strict=True)):
        same = int(old.checksum) == int(new.checksum)
        if old.grid != new.grid or not same or old.seconds != new.seconds:
            what = "size" if old.grid != new.grid else SECONDS_KEY if same else "pixels"
            raise ValueError(
                f"{kind} {index} of the conversation is not the one in the cache (other {what}): "
                "the same tokens with another picture. Pass the same pictures, leave the old "
                "ones out, or start with a new cache"
            )


def _check_runs(kind: str, frames: Sequence[int], grid: Tensor, merge: int, apart: bool) -> None:
    """Placeholders against features, item by item."""
    expected = []
    for t, h, w in grid.tolist():
        tokens = h * w // merge**2
        expected += [tokens] * t if apart else [t * tokens]
    if list(frames) != expected:
        raise ValueError(
            f"{kind} placeholders and features do not match: input_ids hold runs of "
            f"{list(frames)} {kind} tokens, {GRID_KEYS[kind]} makes {expected}"
        )


def _describe(kind: str, media: _Media) -> list[Item]:
    """Items with their checksums."""
    grids = [(int(t), int(h), int(w)) for t, h, w in media.grid.tolist()]
    parts = media.pixels.split([t * h * w for t, h, w in grids])
    known = zip(grids, map(_checksum, parts), media.seconds, strict=True)
    return [Item(kind, grid, checksum, seconds) for grid, checksum, seconds in known]


def _checksum(pixels: Tensor) -> Tensor:
    """Position-weighted sum of the raw bits, modulo 2^64: exact, and the same in any order."""
    words = {2: torch.int16, 4: torch.int32, 8: torch.int64}[pixels.element_size()]
    bits = pixels.detach().contiguous().view(words)
    column = (2 * torch.arange(bits.shape[1], device=bits.device) + 1) * 0x9E3779B97F4A7C1
    row = (2 * torch.arange(len(bits), device=bits.device) + 1) * 0xC2B2AE3D27D4EB5
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    # In parts, to bound the int64 copy.
    for part, weight in zip(bits.split(4096), row.split(4096), strict=True):
        total += ((part.long() * column).sum(1) * weight).sum()
    return total


def _source_order(
    runs: Sequence[tuple[int, int]], items: dict[str, list[Item]], frames_apart: bool
) -> tuple[Item, ...]:
    """New items in the order in which their placeholders come."""
    waiting = {kind: list(found) for kind, found in items.items()}
    ordered: list[Item] = []
    frames_left = 0
    for code, _ in runs:
        if code == TEXT:
            continue
        if code == VIDEO and frames_left:
            frames_left -= 1
            continue
        item = waiting[KINDS[code]].pop(0)
        frames_left = item.grid[0] - 1 if code == VIDEO and frames_apart else 0
        ordered.append(item)
    return tuple(ordered)


def query_mask(ids: Tensor, types: Tensor, ends: frozenset[int], special: frozenset[int]) -> Tensor:
    """bool [L]: the current turn's text, the query of query-aware selectors (rule 12).

    In chat markup every message is ``start role newline ... end newline``, and what follows the
    last end opens the answer. That fixes the start and newline tokens without a tokenizer: the
    last ended message whose start token also opens the answer is the current turn. Where the input
    has no such shape, all text tokens that are not special count.

    Args:
        ids: int64 [L] on the CPU, the new input.
        types: int64 [L], 0 for text.
        ends: Token ids that end a message.
        special: Token ids that never count.
    """
    unwanted = torch.tensor(sorted(special | ends), dtype=ids.dtype)
    text = (types == TEXT) & ~torch.isin(ids, unwanted)
    span = _last_message(ids.tolist(), ends)
    if span is None:
        return text
    inside = torch.zeros_like(text)
    inside[slice(*span)] = True
    return text & inside if bool((text & inside).any()) else text


def _last_message(ids: Sequence[int], ends: frozenset[int]) -> tuple[int, int] | None:
    stops = [at for at, token in enumerate(ids) if token in ends]
    if not stops or stops[-1] + 2 >= len(ids):
        return None
    stop = stops[-1]
    newline, opening = ids[stop + 1], ids[stop + 2]
    start = stops[-2] + 2 if len(stops) > 1 else 0
    if ids[start] != opening or newline not in ids[start:stop]:
        return None
    return ids.index(newline, start, stop) + 1, stop
