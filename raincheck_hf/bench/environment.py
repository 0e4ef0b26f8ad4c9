"""What a result or a bug report ran on. Nothing here fails when something is missing."""

from __future__ import annotations

import importlib
import importlib.metadata
import platform
import subprocess
from pathlib import Path
from typing import Any

PACKAGES = ("torch", "torchvision", "triton", "transformers", "accelerate", "raincheck_hf")
EXTRAS = ("flash-attn", "flash-linear-attention", "causal-conv1d", "bitsandbytes")


def version(package: str) -> str:
    """An installed package's version, or "not installed"."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def processor_name() -> str:
    """The CPU, as far as the system tells."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine() or "unknown"


def machine(device: str) -> str:
    """The name of what a device computes on."""
    torch = _imported("torch")
    if device.startswith("cuda") and torch is not None and torch.cuda.is_available():
        return str(torch.cuda.get_device_name(device))
    return processor_name()


def commit() -> str | None:
    """The commit of the package's own git checkout, marked if changed; None outside of one."""
    here = str(Path(__file__).parent)

    def git(*words: str) -> str:
        command = ["git", "-C", here, *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
        return done.stdout.strip()

    try:
        # An installed copy may lie inside some other project's checkout.
        git("ls-files", "--error-unmatch", str(Path(__file__).parents[1] / "__init__.py"))
        changed = git("status", "--porcelain", "--untracked-files=no")
        return git("rev-parse", "HEAD") + ("+changes" if changed else "")
    except (OSError, subprocess.SubprocessError):
        return None


def provenance(device: str) -> dict[str, Any]:
    """What every result row carries: versions, machine and commit."""
    versions = {name: version(name) for name in ("torch", "transformers", "raincheck_hf")}
    versions["python"] = platform.python_version()
    return {"versions": versions, "machine": machine(device), "commit": commit()}


def block() -> str:
    """The paste-ready block of `raincheck-hf env`."""
    rows = [("python", platform.python_version()), ("system", platform.platform())]
    rows += [(name, version(name)) for name in PACKAGES]
    rows += [(name, version(name)) for name in EXTRAS]
    rows += [("commit", commit() or "not a git checkout"), ("cpu", processor_name())]
    rows += _accelerators()
    rows.append(("attention", ", ".join(_attention())))
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)


def _imported(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except Exception:  # a broken installation raises anything, and is what a report is about
        return None


def _accelerators() -> list[tuple[str, str]]:
    torch = _imported("torch")
    if torch is None:
        return [("torch threads", "torch cannot be imported")]
    rows = [("torch threads", str(torch.get_num_threads()))]
    try:
        rows.append(("cuda", torch.version.cuda or "not in this build of torch"))
        for index in range(torch.cuda.device_count()):
            card = torch.cuda.get_device_properties(index)
            size = card.total_memory / 2**30
            rows.append(
                (f"gpu {index}", f"{card.name}, {size:.0f} GiB, sm_{card.major}{card.minor}")
            )
        if not torch.cuda.device_count():
            rows.append(("gpu", "none"))
    except Exception as error:
        rows.append(("gpu", f"cannot be asked: {error}"))
    return rows


def _attention() -> list[str]:
    """Names that `attn_implementation` can take here."""
    utils = _imported("transformers.utils")
    names = ["eager", "sdpa"] if utils is not None else ["transformers cannot be imported"]
    for check, name in {
        "is_flash_attn_2_available": "flash_attention_2",
        "is_flash_attn_3_available": "flash_attention_3",
        "is_torch_flex_attn_available": "flex_attention",
    }.items():
        try:
            if getattr(utils, check)():
                names.append(name)
        except Exception:
            continue
    return names
