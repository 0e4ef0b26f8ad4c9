"""The web demo: `python demos/gradio_app.py`, then open the address that it prints.

It starts on two small models that come with the package and need no download. `--model` takes a
checkpoint's folder or hub id instead.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"
# Seconds until a closed tab is noticed and its memory freed.
os.environ.setdefault("GRADIO_HEARTBEAT_INTERVAL", "2")

import chat_page as page
import gradio as gr
import torch
from chat_backend import WAYS, Controls, Conversation, Conversations, Refused
from chat_models import Models, is_tiny

from raincheck_hf.selection import list_selectors

EXAMPLES = ("Read the board.", "What is in D5?", "Read row 3.")
_TICK_SECONDS = 0.3
_SYSTEM_FONTS = ["system-ui", "Segoe UI", "Roboto", "Helvetica Neue", "Arial", "sans-serif"]
_SYSTEM_MONO = ["ui-monospace", "SFMono-Regular", "Menlo", "Consolas", "monospace"]
_HEAD = """<div class="rc-head"><h1>Raincheck</h1><p>Ask about a picture. Raincheck answers from a
fraction of its tokens, and restores the others while it writes and after.</p></div>"""


class App:
    """The page's components, and what its events do; all state is in the conversations."""

    def __init__(self, models: Models) -> None:
        self._models = models
        self._conversations = Conversations(models)
        self._tiny = is_tiny(models.names[0])

    @property
    def tabs(self) -> int:
        """Browser tabs whose conversations are held."""
        return len(self._conversations)

    def build(self) -> gr.Blocks:
        """Lay out the page and connect it."""
        with gr.Blocks(title="Raincheck", analytics_enabled=False) as demo:
            gr.HTML(_HEAD)
            with gr.Row():
                with gr.Column(scale=4, min_width=320):
                    self._build_chat()
                with gr.Column(scale=1, min_width=250):
                    self._build_controls()
            self._timer = gr.Timer(_TICK_SECONDS, active=False)
            self._connect(demo)
        return demo

    def _build_chat(self) -> None:
        self._views = gr.HTML(elem_id="views")
        self._transcript = gr.HTML(elem_id="transcript")
        with gr.Column(elem_id="composer"):
            self._build_composer()

    def _build_composer(self) -> None:
        self._notice = gr.HTML(elem_id="notice")
        small: dict[str, Any] = {"size": "sm", "scale": 0}
        with gr.Row(elem_classes="rc-row"):
            self._attached = gr.HTML(elem_id="attached")
            self._upload = gr.UploadButton(
                "Add pictures or a video", file_count="multiple", file_types=["image", "video"],
                elem_id="upload", min_width=180, **small,
            )  # fmt: skip
            self._board = gr.Button("New board", visible=self._tiny, min_width=100, **small)
            self._remove = gr.Button("Remove", min_width=80, **small)
        with gr.Row(equal_height=True):
            self._question = gr.Textbox(
                label="Question", placeholder=EXAMPLES[0], scale=5, min_width=220,
                elem_id="question", max_length=4000,
            )  # fmt: skip
            self._ask = gr.Button("Ask", variant="primary", scale=0, min_width=100, elem_id="ask")
            self._stop = gr.Button(
                "Stop", interactive=False, scale=0, min_width=100, elem_id="stop"
            )
        with gr.Row():
            self._examples = [
                gr.Button(text, visible=self._tiny, min_width=110, **small) for text in EXAMPLES
            ]
            self._clear = gr.Button("Clear conversation", min_width=150, **small)

    def _build_controls(self) -> None:
        names = list(self._models.names)
        self._model = gr.Dropdown(
            names, value=names[0], label="Model (starts anew)",
            interactive=len(names) > 1, elem_id="model",
        )  # fmt: skip
        default = Controls()
        self._ways = gr.CheckboxGroup(list(WAYS), value=list(WAYS), label="Ways to answer")
        self._controls = [
            self._ways,
            gr.Slider(0.05, 1, default.retention, step=0.05, label="Retention: share seen first"),
            gr.Dropdown(
                list_selectors(), value=default.selector, label="Selector: chooses that share"
            ),
            gr.Slider(1, 127, default.chunk_size, step=1, label="Chunk: restored a step"),
            gr.Slider(0, 64, default.guard_tokens, step=1, label="Guard: steps before that"),
            gr.Slider(1, 1024, default.most_tokens, step=1, label="Longest answer, tokens"),
        ]

    def _connect(self, demo: gr.Blocks) -> None:
        everything = [self._views, self._transcript, self._notice, self._attached, self._ask,
                      self._stop, self._timer]  # fmt: skip
        quiet: dict[str, Any] = {"show_progress": "hidden", "api_visibility": "private"}
        demo.load(self._on_load, self._controls, everything, **quiet)
        demo.unload(self._on_unload)
        gr.on(
            [self._ask.click, self._question.submit],
            self._on_ask, [self._question, *self._controls], [*everything, self._question],
            concurrency_limit=8, **quiet,
        )  # fmt: skip
        for button in self._examples:
            button.click(
                self._on_ask, [button, *self._controls], [*everything, self._question],
                concurrency_limit=8, **quiet,
            )  # fmt: skip
        # Not queued: it must get through while an answer holds a place.
        self._stop.click(self._on_stop, queue=False, **quiet)
        self._upload.upload(self._on_upload, [self._upload, *self._controls], everything, **quiet)
        for control, act in (
            (self._board, Conversation.attach_board),
            (self._remove, Conversation.detach),
            (self._clear, Conversation.clear),
        ):
            control.click(self._on_click(act), self._controls, everything, **quiet)
        self._model.input(self._on_model, [self._model, *self._controls], everything, **quiet)
        self._ways.input(self._on_tick, self._controls, everything, **quiet)
        self._timer.tick(self._on_tick, self._controls, everything, **quiet)

    # -- events; what they return goes to the components in `everything` ------------------------

    def _on_load(self, request: gr.Request, *controls: Any) -> tuple[Any, ...]:
        conversation = self._of(request)
        if conversation.offers_boards() and not conversation.turns:
            conversation.attach_board()
        return self._show(conversation, controls)

    def _on_unload(self, request: gr.Request) -> None:
        self._conversations.close(str(request.session_hash))

    def _on_ask(self, request: gr.Request, text: str, *controls: Any) -> Iterator[tuple[Any, ...]]:
        conversation = self._of(request)
        left: Any = ""  # the question leaves its box once; what is typed meanwhile stays
        try:
            for _ in conversation.ask(text, _controls(controls)):
                yield *self._show(conversation, controls, []), left
                left = gr.skip()
        except (Refused, ValueError, OSError) as error:
            yield *self._show(conversation, controls, [str(error)]), gr.skip()
        else:
            yield *self._show(conversation, controls), gr.skip()

    def _on_stop(self, request: gr.Request) -> None:
        self._of(request).stop()

    def _on_upload(
        self, request: gr.Request, paths: Sequence[str], *controls: Any
    ) -> tuple[Any, ...]:
        conversation = self._of(request)
        return self._show(conversation, controls, conversation.attach(paths or []))

    def _on_click(self, act: Any) -> Any:
        def click(request: gr.Request, *controls: Any) -> tuple[Any, ...]:
            conversation = self._of(request)
            act(conversation)
            return self._show(conversation, controls, [])

        return click

    def _on_model(self, request: gr.Request, name: str, *controls: Any) -> tuple[Any, ...]:
        conversation = self._of(request)
        if name != conversation.model:  # one choice may be told twice
            conversation.clear(name)
            if conversation.offers_boards():
                conversation.attach_board()
        return self._show(conversation, controls, [])

    def _on_tick(self, request: gr.Request, *controls: Any) -> tuple[Any, ...]:
        return self._show(self._of(request), controls)

    def _of(self, request: gr.Request) -> Conversation:
        return self._conversations.of(str(request.session_hash))

    def _show(
        self, conversation: Conversation, controls: Sequence[Any], messages: list[str] | None = None
    ) -> tuple[Any, ...]:
        """The page as the conversation is now; without messages, those there stay."""
        busy = conversation.busy
        return (
            page.views(conversation, tuple(controls[0])),
            page.transcript(conversation),
            gr.skip() if messages is None else page.notice(messages),
            page.attachments(conversation),
            gr.Button(interactive=not busy),
            gr.Button(interactive=busy),
            # The view goes on filling after the answer.
            gr.Timer(active=not busy and conversation.pending > 0),
        )


def _controls(values: Sequence[Any]) -> Controls:
    ways, retention, selector, chunk_size, guard_tokens, most_tokens = values
    return Controls(
        tuple(ways), float(retention), selector, int(chunk_size), int(guard_tokens),
        int(most_tokens),
    )  # fmt: skip


def serve(app: App, host: str, port: int | None, wait: bool = True) -> gr.Blocks:
    """Serve the page; nothing on it comes from elsewhere.

    Args:
        app: The app.
        host: Address to listen on.
        port: Port; None takes a free one.
        wait: Whether to return only when interrupted.
    """
    demo = app.build()
    demo.launch(
        server_name=host,
        server_port=port,
        prevent_thread_lock=not wait,
        share=False,
        ssr_mode=False,
        run_history=False,
        footer_links=[],
        max_file_size="200mb",
        theme=gr.themes.Default(
            primary_hue="blue", spacing_size="sm", font=_SYSTEM_FONTS, font_mono=_SYSTEM_MONO
        ),
        css_paths=[Path(__file__).with_name("chat_style.css")],
    )
    return demo


def main(argv: Sequence[str] | None = None) -> None:
    """Serve the page until interrupted."""
    parser = argparse.ArgumentParser(description="Full, hard and raincheck side by side.")
    parser.add_argument("--model", help="a checkpoint's folder or hub id [the two small models]")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on [127.0.0.1]")
    parser.add_argument("--port", type=int, default=7860, help="[7860]")
    args = parser.parse_args(argv)
    if args.model is None or is_tiny(args.model):
        # Passes of small models are too short to share among threads.
        torch.set_num_threads(1)
    models = Models(args.model)
    try:
        models.get(models.names[0])  # so that a wrong name fails here, and no first visitor waits
    except (OSError, ValueError) as error:
        parser.error(f"--model {args.model}: {error}")
    serve(App(models), args.host, args.port)


if __name__ == "__main__":
    main()
