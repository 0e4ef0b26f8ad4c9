"""What lmms-eval finds through the entry point group `lmms_eval.models`.

Apart from the model, so that listing models loads nothing more.
"""

from __future__ import annotations

from typing import Any


def raincheck_qwen() -> Any:
    """The manifest, a `lmms_eval.models.registry_v2.ModelManifest`.

    Only a chat model: tasks hand it messages, so that text, images and videos keep their order.
    """
    from lmms_eval.models.registry_v2 import ModelManifest

    return ModelManifest(
        model_id="raincheck_qwen",
        chat_class_path="raincheck_hf.harness.lmms_eval.RaincheckQwen",
    )
