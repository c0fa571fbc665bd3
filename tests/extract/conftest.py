"""A tiny random Llama as a model directory, and settings to extract with."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tiny_targets import save_tiny


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="session")
def tiny_hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny("qwen3_5_wrapper", tmp_path_factory.mktemp("qwen3_5"))
